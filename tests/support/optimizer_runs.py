"""Jobs for gloo ranks: steps with an optimizer, and its states in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ascend_run.plugin_api import TensorShard
from ascend_run.testing.runtime import RankOutcome
from tests.support.small_runs import Training, Values, outcome_of, training


@attrs.frozen
class Steps:
    """What a rank held after each step."""

    outcomes: list[RankOutcome]
    """Weights, master weights and states, by their names in a checkpoint."""
    skipped: list[bool]
    state_bytes: int
    """Bytes of the optimizer's states and master weights."""
    has_parts: bool
    """Whether the optimizer updates a part of a parameter."""


def shards_of(run: Training, vocab_size: int) -> list[TensorShard]:
    """Return the shards of a checkpoint."""
    from ascend_run.core.checkpoint.optimizer_shards import optimizer_shards
    from ascend_run.core.checkpoint.regions import model_shards, sharded_tensors

    tensors = sharded_tensors(run.bundle.chunks, vocab_size=vocab_size)
    spec = run.bundle.optimizer_spec
    assert spec is not None
    states = optimizer_shards(run.bundle.optimizer, tensors, declared=spec.states)
    return [*model_shards(tensors, prefix="model"), *states]


def stepwise(values: Values, enable: Sequence[str], steps: int) -> Steps:
    """Take steps, and look at the state before the first and after each."""
    from ascend_run.core.checkpoint.optimizer_shards import stepped_parameters

    with training(values, enable) as run:
        size = values["model.vocab_size"]
        outcomes, skipped = [outcome_of(shards_of(run, size))], []
        for _ in range(steps):
            skipped.append(run.step().skipped)
            outcomes.append(outcome_of(shards_of(run, size)))
        items = [*stepped_parameters(run.bundle.optimizer)]
        held = [tensor for item in items for tensor in item.inner.state[item.stepped].values()]
        held += [i.stepped for i in items if i.stepped.dtype != i.parameter.dtype]
        return Steps(
            outcomes,
            skipped,
            sum(t.numel() * t.element_size() for t in held),
            any(item.stepped.numel() < item.parameter.numel() for item in items),
        )


def unknown_names(values: Values, enable: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    """Begin a run, and return what is logged of an option, its names and names near those."""
    from structlog.testing import capture_logs

    with training(values, enable) as run, capture_logs() as events:
        run.hooks.event("ascend_before_run")(context=run.context)
        return [
            (event["option"], event["names"], event["did_you_mean"])
            for event in events
            if event["event"] == "optimizer.unknown_names"
        ]


def held_bytes(values: Values, enable: Sequence[str]) -> int:
    """Take a step, and return the bytes of the optimizer's states and master weights."""
    from ascend_run.core.checkpoint.optimizer_shards import stepped_parameters

    with training(values, enable) as run:
        run.step()
        items = [*stepped_parameters(run.bundle.optimizer)]
        held = [tensor for item in items for tensor in item.inner.state[item.stepped].values()]
        held += [i.stepped for i in items if i.stepped.dtype != i.parameter.dtype]
        return sum(t.numel() * t.element_size() for t in held)


def saved(values: Values, enable: Sequence[str], folder: str) -> RankOutcome:
    """Take three steps, save, and return what was saved."""
    from ascend_run.core.checkpoint import FileStore, GroupRanks

    with training(values, enable) as run:
        for _ in range(3):
            run.step()
        shards = shards_of(run, values["model.vocab_size"])
        FileStore(folder, layout=run.context.layout, ranks=GroupRanks()).save(3, shards, {})
        return outcome_of(shards)


def loaded(values: Values, enable: Sequence[str], folder: str) -> RankOutcome:
    """Load before the first step, and return what is then held."""
    from ascend_run.core.checkpoint import FileStore, GroupRanks

    with training(values, enable) as run:
        shards = shards_of(run, values["model.vocab_size"])
        FileStore(folder, layout=run.context.layout, ranks=GroupRanks()).load(3, shards)
        return outcome_of(shards_of(run, values["model.vocab_size"]))
