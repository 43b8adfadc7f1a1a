"""Runs that recompute in advance against runs that recompute in backward: bitwise equal."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.parity import compare
from ascend_run.testing.pool import GlooPool
from tests.plugins.memory.ahead_runs import outcomes, recomputed_layers

NAME: Final = "recompute-in-advance"
NUMBER: Final = f"plugins.{NAME}.num_layers"
STEPS: Final = 20
FEW: Final = 3
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
CHUNKS: Final = {
    "model.num_layers": 4,
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.virtual_pipeline_model_parallel_size": 2,
}
GROUP: Final = "parallel.microbatch_group_size_per_vp_stage"
TENSORS: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
pytestmark = pytest.mark.needs_plugins("recompute")


runs = partial(outcomes, NAME)
counts = partial(recomputed_layers, NAME)


@pytest.mark.exhaustive(by=lambda steps: [steps] if steps == FEW else [])
@pytest.mark.parametrize("steps", [FEW, STEPS])
def test_steps_with_dropout_change_no_bit(gloo_pool: GlooPool, steps: int) -> None:
    """A rank has two chunks of a layer and four micro-batches. The last chunk of the last rank
    waits for no gradient."""
    config = {**DENSE, **CHUNKS, **DROPOUT, "train.train_iters": steps}
    plain, ours = runs(gloo_pool, config, ("recompute",), steps=steps)
    assert [*compare(ours, plain, 0.0)] == []
    assert len(ours[0].losses) == steps
    assert [counts(outcome) for outcome in ours] == [(8, 0), (4, 4)]


@pytest.mark.exhaustive(
    by=lambda config: [config["model.family"], *({NUMBER, GROUP} & config.keys())]
)
@pytest.mark.parametrize(
    ("config", "ahead"),
    [
        ({**DENSE, **CHUNKS, "model.num_layers": 8, NUMBER: 1}, [(8, 8), (4, 12)]),
        ({**DENSE, **CHUNKS, "model.num_layers": 8}, [(16, 0), (8, 8)]),
        ({**DENSE, **CHUNKS, "plugins.recompute.num_layers": 1}, [(4, 0), (4, 0)]),
        ({**DENSE, **CHUNKS, "train.global_batch_size": 2}, [(4, 0), (2, 2)]),
        ({**DENSE, **CHUNKS, GROUP: 3, "train.global_batch_size": 6}, [(12, 0), (5, 7)]),
        ({**MOE, **CHUNKS}, [(8, 0), (4, 4)]),
    ],
    ids=[
        "one of two",
        "two layers of a chunk",
        "one chunk",
        "warm-up only",
        "groups of three",
        "experts",
    ],
)
def test_gradients_change_no_bit(
    gloo_pool: GlooPool, config: Mapping[str, Any], ahead: list[tuple[float, float]]
) -> None:
    plain, ours = runs(gloo_pool, {**config, **DROPOUT}, ("recompute",))
    assert [*compare(ours, plain, 0.0)] == []
    for one, other in zip(ours, plain, strict=True):
        assert one.operations["silu"] == other.operations["silu"]
    assert [counts(outcome) for outcome in ours] == ahead


@pytest.mark.needs_plugins("recompute-comm-opt")
def test_collectives_of_what_is_recomputed_are_as_many(gloo_pool: GlooPool) -> None:
    """All ranks of a stage recompute at the same places; each block of a layer has its own."""
    config = {**DENSE, **CHUNKS, **DROPOUT, **TENSORS, "plugins.recompute-comm-opt.level": 2}
    names = ("recompute", "recompute-comm-opt")
    plain, ours = runs(gloo_pool, config, names, ranks=4)
    assert [*compare(ours, plain, 0.0)] == []
    assert [outcome.collectives for outcome in ours] == [one.collectives for one in plain]
    assert {counts(outcome) for outcome in ours} == {(8, 0), (4, 4)}
