"""What a run holds beside models and optimizers: progress, random generators, plugins' state."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.contracts import CheckpointEntry, ShardPiece


class EntryPieces:
    """The tensors of entries as pieces, and their values as JSON, of this rank.

    A plain tensor belongs to one rank: its key is ``<name>/rank_00003/<tensor>``. A ShardPiece is
    this rank's part of a tensor of the whole run, ``<name>/<tensor>``, whatever key it has itself.
    JSON values belong to the run and must be the same on every rank.

    Args:
        entries: Name -> entry.
        rank: This process's.
    """

    def __init__(self, entries: Mapping[str, CheckpointEntry], rank: int) -> None:
        self._entries = entries
        self._tensors: dict[str, dict[str, Tensor]] = {name: {} for name in entries}
        self.values: dict[str, Any] = {name: {} for name in entries}
        self.pieces: list[ShardPiece] = []
        self.of_this_rank: set[str] = set()
        """Names of the entries with tensors that belong to this rank."""
        for name, entry in entries.items():
            for key, item in entry.state_dict().items():
                if isinstance(item, ShardPiece):
                    piece = attrs.evolve(item, key=f"{name}/{key}", tensor=item.tensor.clone())
                elif isinstance(item, Tensor):
                    self.of_this_rank.add(name)
                    piece = ShardPiece(
                        key=f"{name}/rank_{rank:05d}/{key}",
                        tensor=item.clone(),
                        global_shape=tuple(item.shape),
                        offset=(0,) * item.ndim,
                    )
                else:
                    self.values[name][key] = item
                    continue
                self.pieces.append(piece)
                self._tensors[name][key] = piece.tensor

    def restore(self, values: Mapping[str, Any]) -> None:
        """Hand every entry its tensors, once they are loaded into the pieces, and its values.

        Raises:
            CheckpointError: The checkpoint has no values of an entry.
        """
        missing = [
            f"{name}: the checkpoint does not have it" for name in self._entries.keys() - values
        ]
        if missing:
            raise CheckpointError("the checkpoint does not fit", sorted(missing))
        for name, entry in self._entries.items():
            entry.load_state_dict({**self._tensors[name], **values[name]})


@attrs.frozen
class DeviceGenerator:
    """A device's generator: ``torch.cuda`` and its like."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], None]


class RandomState:
    """The generators of this rank: Python's, numpy's, torch's on the host and on the device, and
    Megatron's tracker of those that differ between parallel ranks.

    Args:
        device: None where the run draws nothing on a device of its own.
        tracker: Megatron's ``get_cuda_rng_tracker()``.
    """

    def __init__(self, device: DeviceGenerator | None = None, tracker: Any = None) -> None:
        self._device = device
        self._tracker = tracker

    def state_dict(self) -> dict[str, Tensor]:
        _, words, spare = random.getstate()
        _, keys, position, has_spare, numpy_spare = np.random.get_state(legacy=True)
        state = {
            "python": torch.tensor(words, dtype=torch.int64),
            "python_spare": _optional(spare),
            "numpy": torch.tensor([*map(int, keys), position], dtype=torch.int64),
            "numpy_spare": _optional(float(numpy_spare) if has_spare else None),
            "torch": torch.get_rng_state(),
        }
        if self._device is not None:
            state["device"] = self._device.get()
        if self._tracker is not None:
            for name, tracked in self._tracker.get_states().items():
                state[f"tracker.{name}"] = tracked
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        random.setstate((3, tuple(state["python"].tolist()), _value(state["python_spare"])))
        *keys, position = state["numpy"].tolist()
        spare = _value(state["numpy_spare"])
        np.random.set_state(
            ("MT19937", np.array(keys, np.uint32), position, int(spare is not None), spare or 0.0)
        )
        torch.set_rng_state(state["torch"])
        if self._device is not None:
            self._device.set(state["device"])
        if self._tracker is not None:
            prefix = "tracker."
            states = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            self._tracker.set_states(states)


def _optional(value: float | None) -> Tensor:
    """The normal variate that a generator may hold back: [0, 0], or [1, the variate]."""
    return torch.tensor([0.0, 0.0] if value is None else [1.0, value], dtype=torch.float64)


def _value(spare: Tensor) -> float | None:
    return float(spare[1]) if spare[0] else None


class Progress:
    """Where training stands: steps, samples, the schedule and the loss scale. JSON values only.

    ``went_back_to`` is the step that ``checkpoint.step`` last went back to on the way here;
    ``fingerprint`` tells one run's weights from another's, and is kept for whoever compares them.

    Args:
        context: A RunContext; ``step`` and ``consumed_samples`` are read and set.
        optimizer: Megatron's, with its loss scale.
        scheduler: Megatron's; only its count of steps is kept, since the rest is the run's config
            and may be changed between two runs (more steps, another rate).
    """

    def __init__(self, context: Any, optimizer: Any, scheduler: Any) -> None:
        self._context = context
        self._optimizer = optimizer
        self._scheduler = scheduler
        self.went_back_to: int | None = None
        self.fingerprint: str | None = None

    def state_dict(self) -> dict[str, Any]:
        scalers = [scaler.state_dict() for scaler in self._grad_scalers()]
        return {
            "step": self._context.step,
            "consumed_samples": self._context.consumed_samples,
            "schedule_steps": self._scheduler.num_steps,
            "loss_scalers": [{k: _number(v) for k, v in state.items()} for state in scalers],
            "went_back_to": self.went_back_to,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        scalers = self._grad_scalers()
        if len(scalers) != len(state["loss_scalers"]):
            raise CheckpointError(
                f"the checkpoint has {len(state['loss_scalers'])} loss scales, this run "
                f"{len(scalers)}; train.precision must be what it was"
            )
        for scaler, saved in zip(scalers, state["loss_scalers"], strict=True):
            if saved:
                scale = torch.full_like(scaler.scale, saved["scale"])
                scaler.load_state_dict({**saved, "scale": scale})
        self._scheduler.step(state["schedule_steps"] - self._scheduler.num_steps)
        self._context.step = state["step"]
        self._context.consumed_samples = state["consumed_samples"]
        self.went_back_to = state.get("went_back_to")

    def _grad_scalers(self) -> list[Any]:
        parts = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        scalers = (getattr(part, "grad_scaler", None) for part in parts)
        # Optimizers of one run may share a scale.
        return list({id(scaler): scaler for scaler in scalers if scaler is not None}.values())


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
