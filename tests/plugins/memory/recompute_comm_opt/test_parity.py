"""Runs that leave out sums against runs that repeat them: bitwise equal, with fewer collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.parity import compare
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from tests.support.needed_plugins import case

STEPS, FEW = 20, 3
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
TENSORS: Final = {"parallel.tensor_model_parallel_size": 2}
SEQUENCE: Final = {**TENSORS, "parallel.sequence_parallel": True}
STAGES: Final = {"parallel.pipeline_model_parallel_size": 2}
MLPS: Final = {"plugins.recompute.granularity": "selective", "plugins.recompute.modules": ["mlp"]}
BIASES: Final = {"model.add_bias_linear": True, "model.normalization": "LayerNorm"}
SHARED: Final = {"model.moe_shared_expert_intermediate_size": 24}
LEVEL: Final = "plugins.recompute-comm-opt.level"
LETTERS: Final = {
    "allreduce_": "r",
    "_allgather_base_": "g",
    "allgather_": "g",
    "_reduce_scatter_base_": "s",
    "reduce_scatter_": "s",
}


def without_and_with(
    pool: GlooPool,
    config: Mapping[str, Any],
    level: int,
    beside: tuple[str, ...] = (),
    steps: int = 0,
) -> tuple[list[RankOutcome], list[RankOutcome]]:
    ranks = 2 * config.get("parallel.pipeline_model_parallel_size", 1)
    plugins = ("recompute", *beside)
    plain, ours = (
        Trial(plugins=names, config=values, steps=steps, counted=not steps)
        for names, values in (
            (plugins, config),
            (("recompute-comm-opt", *plugins), {**config, LEVEL: level}),
        )
    )
    return pool.run(run_trial, ranks, plain), pool.run(run_trial, ranks, ours)


def sums(outcome: RankOutcome) -> int:
    return sum(
        outcome.collectives.get(name, 0) for name, letter in LETTERS.items() if letter in "rs"
    )


@pytest.mark.exhaustive(
    by=lambda config, level, steps: (
        [level, "model.add_bias_linear" in config] if steps == FEW else []
    )
)
@pytest.mark.needs_plugins("recompute")
@pytest.mark.parametrize("steps", [FEW, STEPS])
@pytest.mark.parametrize(
    ("config", "level", "fewer"),
    [
        ({**DENSE, **TENSORS, **BIASES}, 2, 4 * 2 * 2),
        ({**DENSE, **SEQUENCE}, 1, 4 * 2),
        ({**DENSE, **SEQUENCE, **BIASES}, 2, 4 * 2 * 2),
        ({**DENSE, **SEQUENCE, **STAGES}, 2, 4 * 2),
        ({**MOE, **SEQUENCE, **SHARED}, 2, 4 * 2),
        ({**DENSE, **SEQUENCE, **MLPS}, 1, 4 * 2),
    ],
    ids=["tp", "sequence", "sequence, by blocks", "pp", "experts", "feed-forwards"],
)
def test_steps_with_dropout_change_no_bit(
    gloo_pool: GlooPool, config: Mapping[str, Any], level: int, fewer: int, steps: int
) -> None:
    """``fewer``: sums of one rank in four micro-batches. Experts repeat their own."""
    config = {**config, **DROPOUT, "train.train_iters": steps}
    plain, ours = without_and_with(gloo_pool, config, level)
    assert [*compare(ours, plain, 0.0)] == []
    for one, other in zip(ours, plain, strict=True):
        assert sums(other) - sums(one) == fewer
    config["train.global_batch_size"] = 2
    plain, ours = without_and_with(gloo_pool, config, level, steps=steps)
    assert [*compare(ours, plain, 0.0)] == []
    assert len(ours[0].losses) == steps


@pytest.mark.exhaustive(by=lambda beside: [beside])
@pytest.mark.parametrize(
    ("beside", "config"),
    [
        case(("lora",), {**DENSE, **SEQUENCE, "plugins.lora.export": False}, id="adapters"),
        case(("matmul-add",), {**DENSE, **SEQUENCE}, id="gradients added in the product"),
        case(("swap-attention", "recompute-norm"), {**DENSE, **TENSORS}, id="other layers"),
    ],
)
@pytest.mark.needs_plugins("recompute")
def test_beside_others_no_bit_changes(
    gloo_pool: GlooPool, beside: tuple[str, ...], config: Mapping[str, Any]
) -> None:
    """The first layer is recomputed; adapters have sums of their own, which are repeated."""
    config = {**config, "plugins.recompute.num_layers": 1}
    plain, ours = without_and_with(gloo_pool, config, 2, beside)
    assert [*compare(ours, plain, 0.0)] == []
    assert {sums(one) - sums(other) for one, other in zip(plain, ours, strict=True)} == {4 * 2}


def sequence(outcome: RankOutcome, hidden: int) -> str:
    """Return a letter for each collective over hidden states, in the order of the calls."""
    return "".join(
        LETTERS[call.operation]
        for call in outcome.collective_calls
        if call.operation in LETTERS and call.nbytes in (hidden, hidden // 2)
    )


@pytest.mark.needs_plugins("recompute")
@pytest.mark.parametrize(
    ("config", "layer", "levels"),
    [
        (TENSORS, "rr", {0: "rrrr", 1: "rrr", 2: "rr"}),
        (SEQUENCE, "gsgs", {0: "gsgsggsggs", 1: "gsgggsggs", 2: "gggsgggs"}),
    ],
    ids=["tp", "sequence"],
)
def test_the_collectives_of_a_layer_in_their_order(
    gloo_pool: GlooPool, config: Mapping[str, Any], layer: str, levels: Mapping[int, str]
) -> None:
    """Of one micro-batch: sums (``r``, scattered ``s``) and gathers (``g``) of the embedding, the
    layer, the loss and its backward, then the layer repeated and its backward. Without sequence
    parallelism a layer has 6, 5 or 4; with it, by blocks, those of the MLP come before those of the
    attention."""
    values = {**DENSE, **config, "model.num_layers": 1, "train.global_batch_size": 1}
    hidden = 16 * 32 * 8
    before, loss, after = ("r", "r", "") if layer == "rr" else ("s", "gs", "g")
    runs = {level: without_and_with(gloo_pool, values, max(level, 1)) for level in (1, 2)}
    found = {0: runs[1][0], **{level: ours for level, (_, ours) in runs.items()}}
    for level, outcomes in found.items():
        for outcome in outcomes:
            expected = before + layer + loss + levels[level] + after
            assert sequence(outcome, hidden) == expected, level
