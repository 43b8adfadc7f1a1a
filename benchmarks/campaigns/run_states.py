"""All that a run holds at its beginning, after each checkpoint and at its end, as full tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import Manifest, RunContext, hookimpl
from ascend_run.testing.runtime import Shard
from ascend_run.testing.tensors import assemble

from .watched_runs import run_state, train_beside

if TYPE_CHECKING:
    from torch import Tensor

_OF_A_RANK: Final = re.compile(r"[^/]+/rank_\d+/")


@attrs.frozen
class RankState:
    """What one rank holds after a step."""

    shards: Sequence[Shard]
    """Of weights, optimizer states and tensors of plugins, by their keys in a checkpoint."""
    of_rank: Mapping[str, Tensor]
    """Key -> tensor that belongs to this rank alone, such as the state of a random generator."""
    values: Mapping[str, Any]
    """What is no tensor: steps and samples, the schedule, the scale of the loss."""


@attrs.frozen
class RunState:
    """What all ranks hold after a step."""

    tensors: Mapping[str, Tensor]
    """Key in a checkpoint -> full tensor."""
    problems: Sequence[str]
    """Replicas that differ, and elements that no rank holds."""
    of_ranks: Mapping[str, Tensor]
    values: Mapping[str, Any]

    @classmethod
    def of(cls, ranks: Sequence[RankState]) -> RunState:
        """Assemble the full tensors."""
        full = assemble(rank.shards for rank in ranks)
        problems = full.problems()
        problems += [
            f"rank {rank}: its values are not those of rank 0"
            for rank, state in enumerate(ranks)
            if state.values != ranks[0].values
        ]
        own = {key: tensor for rank in ranks for key, tensor in rank.of_rank.items()}
        return cls(full.tensors, problems, own, ranks[0].values)


class StateWatch:
    """A plugin that keeps what a run holds before its first step, after each checkpoint and at its
    end."""

    manifest = Manifest(name="state-watch", summary="keep states of a run")

    def __init__(self, plugins: Sequence[Any]) -> None:
        self.plugins = plugins
        self.states: dict[int, RankState] = {}
        """Completed steps -> state."""

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        self._keep(context)

    @hookimpl
    def ascend_after_checkpoint(self, context: RunContext) -> None:
        self._keep(context)

    @hookimpl
    def ascend_after_run(self, context: RunContext) -> None:
        self._keep(context)

    def _keep(self, context: RunContext) -> None:
        if context.step in self.states:
            return
        with run_state(self.plugins, context) as (shards, values):
            own = {s.key: s.tensor.clone() for s in shards if _OF_A_RANK.match(s.key)}
            shared = [
                Shard(
                    name=shard.key,
                    tensor=shard.tensor.detach().clone(),
                    offset=shard.offset,
                    global_shape=shard.global_shape,
                )
                for shard in shards
                if shard.key not in own
            ]
        self.states[context.step] = RankState(shared, own, values)


def states_of_run(folder: Path, asked: Mapping[str, Any]) -> Mapping[int, RankState]:
    """A job: train on the ranks that are there; return completed steps -> what this rank held.

    Args:
        folder: Of the data.
        asked: Arguments of ``tiny_runs.prepare``.
    """
    return train_beside(StateWatch, folder, asked).states


def changed_bits(found: RunState, expected: RunState) -> Iterator[str]:
    """Yield a message for each tensor and value that is not the same to the bit."""
    import torch

    for key in sorted({*found.tensors, *expected.tensors}):
        ours, wanted = found.tensors.get(key), expected.tensors.get(key)
        if ours is None or wanted is None:
            yield f"{key} is of one run only"
        elif ours.dtype != wanted.dtype or not torch.equal(ours, wanted):
            yield f"{key} differs"
    yield from changed_values(found, expected)


def changed_values(found: RunState, expected: RunState) -> Iterator[str]:
    """Yield a message for each value that is another."""
    for name in sorted({*found.values, *expected.values}):
        ours, wanted = found.values.get(name), expected.values.get(name)
        if ours != wanted:
            yield f"'{name}' is {ours!r}, not {wanted!r}"


def other_tensors_of_ranks(found: RunState, expected: RunState) -> Iterator[str]:
    """Yield a message for each tensor of a rank alone that is not the same to the bit."""
    import torch

    for key in sorted({*found.of_ranks, *expected.of_ranks}):
        ours, wanted = found.of_ranks.get(key), expected.of_ranks.get(key)
        if ours is None or wanted is None or not torch.equal(ours, wanted):
            yield f"{key} differs"
