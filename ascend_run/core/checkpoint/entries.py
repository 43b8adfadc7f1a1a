"""Checkpoint entries besides models and optimizers: progress, random generators, plugin state."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch
from torch import Tensor

from ascend_run.core.hook_errors import NamedErrors
from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.contracts import (
    CheckpointEntry,
    ModelBundle,
    RunContext,
    TensorShard,
)

PROGRESS: Final = "progress"
"""Name of the entry with the training progress."""


class EntryShards:
    """This rank's entries: tensors as shards, other values as JSON.

    A plain tensor belongs to one rank and gets the key ``<name>/rank_00003/<tensor>``. A
    TensorShard is this rank's shard of a global tensor and gets the key ``<name>/<tensor>``,
    whatever its own key. JSON values belong to the run and must be equal on all ranks.

    Args:
        entries: Maps names to entries.
        rank: This process's rank.
    """

    def __init__(self, entries: Mapping[str, CheckpointEntry], rank: int) -> None:
        self._entries = entries
        self._tensors: dict[str, dict[str, Tensor]] = {name: {} for name in entries}
        self.values: dict[str, Any] = {name: {} for name in entries}
        self.shards: list[TensorShard] = []
        self.of_this_rank: set[str] = set()
        """Names of the entries with per-rank tensors."""
        for name, entry in entries.items():
            for key, item in entry.state_dict().items():
                if isinstance(item, TensorShard):
                    shard = attrs.evolve(item, key=f"{name}/{key}", tensor=item.tensor.clone())
                elif isinstance(item, Tensor):
                    self.of_this_rank.add(name)
                    shard = TensorShard(
                        key=f"{name}/rank_{rank:05d}/{key}",
                        tensor=item.clone(),
                        global_shape=tuple(item.shape),
                        offset=(0,) * item.ndim,
                    )
                else:
                    self.values[name][key] = item
                    continue
                self.shards.append(shard)
                self._tensors[name][key] = shard.tensor

    def restore(self, values: Mapping[str, Any]) -> None:
        """Pass every entry its tensors, once they are loaded, and its values.

        Raises:
            CheckpointError: The checkpoint has no values for an entry.
        """
        missing = [
            f"{name}: the checkpoint does not have it" for name in self._entries.keys() - values
        ]
        if missing:
            raise CheckpointError("the checkpoint does not match this run", sorted(missing))
        for name, entry in self._entries.items():
            entry.load_state_dict({**self._tensors[name], **values[name]})


@attrs.frozen
class PluginEntry:
    """A plugin's entry; exceptions in it are named."""

    entry: CheckpointEntry
    errors: NamedErrors

    def state_dict(self) -> Mapping[str, Any]:
        with self.errors:
            return self.entry.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self.errors:
            self.entry.load_state_dict(state)


@attrs.frozen
class DeviceGenerator:
    """Getter and setter of a device's generator state, such as those of ``torch.cuda``."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], None]


class RandomState:
    """State of this rank's random generators.

    Covers Python, numpy, torch on host and device, and Megatron's tracker of generators that differ
    between parallel ranks.

    Args:
        device: None if the run draws no random numbers on a device.
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
    """Encode a generator's cached normal variate: [0, 0] if there is none, else [1, variate]."""
    return torch.tensor([0.0, 0.0] if value is None else [1.0, value], dtype=torch.float64)


def _value(spare: Tensor) -> float | None:
    return float(spare[1]) if spare[0] else None


@attrs.frozen(kw_only=True)
class SavedProgress:
    """Training progress as a checkpoint stores it, of JSON values."""

    step: int
    consumed_samples: int
    schedule_steps: int
    loss_scalers: Sequence[Mapping[str, Any]]
    went_back_to: int | None = None  #: Step of the last ``checkpoint.step`` in the run's history.
    fingerprint: str | None = None  #: Identifies the weights; for later comparison only.
    machine_choices: Mapping[str, str] = attrs.field(factory=dict)
    frozen: Mapping[str, Mapping[str, str]] | None = None
    """Role -> ``weight_source``, of models that are not trained; None if it was not recorded."""
    others: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """Role -> ``schedule_steps`` and ``loss_scalers``, of other trained models than the first."""

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> SavedProgress:
        """Return the record of the entry's values; other versions may store more of them."""
        return cls(**{name: state[name] for name in attrs.fields_dict(cls) if name in state})


@attrs.define
class Progress:
    """The entry of the training progress: a run's, as :class:`SavedProgress`."""

    _context: RunContext  #: ``step`` and ``consumed_samples`` are read and set.
    _trained: Mapping[str, ModelBundle]
    """Role -> model, the first role's first. Of a schedule only the step count is saved; the other
    fields come from the config and may change between runs (more steps, another rate)."""
    machine_choices: Mapping[str, str] = attrs.field(factory=dict)
    """Config key -> value, of options that the config may leave to the machine."""
    frozen: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)
    went_back_to: int | None = None
    fingerprint: str | None = None

    def state_dict(self) -> dict[str, object]:
        first, *others = self._trained
        progress = SavedProgress(
            step=self._context.step,
            consumed_samples=self._context.consumed_samples,
            **_update_state(self._trained[first]),
            others={role: _update_state(self._trained[role]) for role in others},
            went_back_to=self.went_back_to,
            fingerprint=self.fingerprint,
            machine_choices=self.machine_choices,
            frozen=self.frozen,
        )
        return attrs.asdict(progress, recurse=False)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        progress = SavedProgress.read(state)
        first, *others = self._trained
        _restore_update(self._trained[first], progress.schedule_steps, progress.loss_scalers)
        for role in others:
            _restore_update(self._trained[role], **progress.others[role])
        self._context.step = progress.step
        self._context.consumed_samples = progress.consumed_samples
        self.went_back_to = progress.went_back_to


def _update_state(bundle: ModelBundle) -> dict[str, Any]:
    """Return what the updates of a trained model count, as JSON values."""
    assert bundle.scheduler is not None
    states = [scaler.state_dict() for scaler in _grad_scalers(bundle)]
    return {
        "schedule_steps": bundle.scheduler.num_steps,
        "loss_scalers": [{k: _number(v) for k, v in state.items()} for state in states],
    }


def _restore_update(
    bundle: ModelBundle, schedule_steps: int, loss_scalers: Sequence[Mapping[str, Any]]
) -> None:
    assert bundle.scheduler is not None
    scalers = _grad_scalers(bundle)
    if len(scalers) != (num_saved := len(loss_scalers)):
        raise CheckpointError(
            f"the checkpoint has {num_saved} loss scales, this run {len(scalers)}; "
            "train.precision must be what it was"
        )
    for scaler, saved in zip(scalers, loss_scalers, strict=True):
        if saved:
            scale = torch.full_like(scaler.scale, saved["scale"])
            scaler.load_state_dict({**saved, "scale": scale})
    bundle.scheduler.step(schedule_steps - bundle.scheduler.num_steps)


def _grad_scalers(bundle: ModelBundle) -> list[Any]:
    parts = getattr(bundle.optimizer, "chained_optimizers", [bundle.optimizer])
    scalers = (getattr(part, "grad_scaler", None) for part in parts)
    # Optimizers of one run may share a loss scale.
    return list({id(scaler): scaler for scaler in scalers if scaler is not None}.values())


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
