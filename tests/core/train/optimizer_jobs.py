"""Jobs for gloo ranks: steps of a third party's optimizer, and its states in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from ascend_run.plugin_api import TensorShard
from ascend_run.testing.runtime import RankOutcome
from tests.support.optimizers import SPECS, Optimizes
from tests.support.small_runs import Training, Values, outcome_of, training


@attrs.frozen
class Stepped:
    """The state of a rank after some steps."""

    outcome: RankOutcome
    """Weights, master weights and states, by their names in a checkpoint."""
    state_bytes: int
    """Bytes of the optimizer's states and master weights."""
    has_parts: bool
    """Whether it updates a part of a parameter."""


@contextmanager
def _after_steps(
    values: Values, name: str, steps: int
) -> Iterator[tuple[Training, Callable[[], list[TensorShard]]]]:
    """A model after steps of one of ``SPECS``, and a function that returns the shards of its
    checkpoint."""
    from ascend_run.core.checkpoint.optimizer_shards import optimizer_shards
    from ascend_run.core.checkpoint.regions import model_shards, sharded_tensors

    with training(values, (), Optimizes(name)) as run:
        for _ in range(steps):
            run.step()
        spec, optimizer = run.bundle.optimizer_spec, run.bundle.optimizer
        assert spec is not None
        assert spec.states == SPECS[name].states

        def shards() -> list[TensorShard]:
            tensors = sharded_tensors(run.bundle.chunks, vocab_size=values["model.vocab_size"])
            states = optimizer_shards(optimizer, tensors, declared=spec.states)
            return [*model_shards(tensors, prefix="model"), *states]

        yield run, shards


def stepped(values: Values, name: str, steps: int) -> Stepped:
    """Take steps and return the state."""
    from ascend_run.core.checkpoint.optimizer_shards import stepped_parameters

    with _after_steps(values, name, steps) as (run, shards):
        held: list[Any] = []
        items = [*stepped_parameters(run.bundle.optimizer)]
        for item in items:
            held += item.inner.state[item.stepped].values()
            held += [item.stepped] if item.stepped.dtype != item.parameter.dtype else []
        return Stepped(
            outcome_of(shards()),
            sum(t.numel() * t.element_size() for t in held),
            any(item.stepped.numel() < item.parameter.numel() for item in items),
        )


def saved(values: Values, name: str, folder: str) -> RankOutcome:
    """Take three steps, save, and return what was saved."""
    from ascend_run.core.checkpoint import FileStore, GroupRanks

    with _after_steps(values, name, 3) as (run, shards):
        FileStore(folder, layout=run.context.layout, ranks=GroupRanks()).save(3, shards(), {})
        return outcome_of(shards())


def loaded(values: Values, name: str, folder: str) -> RankOutcome:
    """Load into a model before its first step, and return what it then holds."""
    from ascend_run.core.checkpoint import FileStore, GroupRanks

    with _after_steps(values, name, 0) as (run, shards):
        FileStore(folder, layout=run.context.layout, ranks=GroupRanks()).load(3, shards())
        return outcome_of(shards())
