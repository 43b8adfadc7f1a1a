"""Runs with moe-adaptive-recompute against the run without it: bitwise equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.testing.models import MOE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from tests.support.moe_memory import Stepped, differences, steps

SCALE: Final = "plugins.moe-adaptive-recompute.scale"
KEEP: Final = "plugins.moe-adaptive-recompute.keep_tokens"
RECOMPUTED: Final = "moe-adaptive-recompute/recomputed"
EXPERTS, LAYERS, MICRO_BATCHES, STEPS = 4, 2, 4, 2
SHARED: Final = {"model.moe_shared_expert_intermediate_size": 24}
SEQUENCE: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
EP: Final = {"parallel.expert_model_parallel_size": 2}
EXPERT_TP: Final = {"parallel.expert_tensor_parallel_size": 2}
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
BIASED: Final = {
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_enable_expert_bias": True,
    "model.moe_router_bias_update_rate": 0.0,
}


def run(
    pool: GlooPool,
    values: Mapping[str, Any],
    *,
    beside: tuple[str, ...] = (),
    ranks: int = 1,
    busy: int = 0,
) -> list[list[Stepped]]:
    """Return, for each rank, the run without the plugin and the one with it."""
    config = {**MOE, **values}
    options = {key: value for key, value in config.items() if "adaptive-recompute" in key}
    plain = {key: value for key, value in config.items() if key not in options}
    runs = [(beside, plain), ((*beside, "moe-adaptive-recompute"), config)]
    return pool.run(steps, ranks, runs, busy)


def recomputed(plain: Stepped, found: Stepped) -> int:
    """Return how many forwards of the layers on this rank were recomputed."""
    local = plain.operations[0]["silu"] // (LAYERS * MICRO_BATCHES)
    more = [found.operations[at]["silu"] - plain.operations[at]["silu"] for at in range(STEPS)]
    assert sum(more) % local == 0
    return sum(more) // local


@pytest.mark.parametrize("keep", [True, False])
def test_gradients_and_weights_are_those_of_the_plain_run(parity: Parity, keep: bool) -> None:
    (outcome,) = parity(
        "moe-adaptive-recompute", model="moe", options={SCALE: 0.5, KEEP: keep}, config=SHARED
    )
    assert outcome.metrics[RECOMPUTED] == LAYERS * MICRO_BATCHES
    shared = MICRO_BATCHES * LAYERS  # never recomputed
    assert outcome.operations["silu"] == 2 * MICRO_BATCHES * LAYERS * EXPERTS + shared


@pytest.mark.exhaustive
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_no_bit_changes_in_half_precision_with_dropout(
    gloo_pool: GlooPool, precision: str, keep: bool
) -> None:
    values = {**DROPOUT, "train.precision": precision, SCALE: 0.5, KEEP: keep}
    ((plain, found),) = run(gloo_pool, values)
    assert differences(found, plain) == []
    assert recomputed(plain, found) == LAYERS * MICRO_BATCHES * STEPS


@pytest.mark.needs_plugins("gmm")
@pytest.mark.parametrize("keep", [True, False])
def test_no_bit_changes_with_grouped_matmuls(gloo_pool: GlooPool, keep: bool) -> None:
    values = {"train.precision": "bf16", SCALE: 0.5, KEEP: keep}
    ((plain, found),) = run(gloo_pool, values, beside=("gmm",))
    assert differences(found, plain) == []
    assert found.operations[0]["silu"] > plain.operations[0]["silu"]


@pytest.mark.exhaustive(by=lambda ranks: [ranks] if ranks == 2 else [])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param(EP, 2, id="ep"),
        pytest.param({**SEQUENCE, **SHARED}, 2, id="tp-sequence-shared"),
        pytest.param({**SEQUENCE, **EXPERT_TP, SCALE: 1.45}, 2, id="expert-tp"),
        pytest.param(
            {**SEQUENCE, **EXPERT_TP, **EP, "model.moe_token_dispatcher_type": "allgather"},
            4,
            id="expert-tp-ep-gathered",
        ),
    ],
)
def test_no_bit_changes_on_several_ranks_of_which_some_exceed(
    gloo_pool: GlooPool, values: Mapping[str, Any], ranks: int, keep: bool
) -> None:
    """A threshold that about half of the layers exceed."""
    outcomes = run(gloo_pool, {SCALE: 1.3, **values, KEEP: keep}, ranks=ranks)
    for plain, found in outcomes:
        assert differences(found, plain) == []
    more = [
        found.operations[at]["silu"] - plain.operations[at]["silu"]
        for plain, found in outcomes
        for at in range(STEPS)
    ]
    assert 0 < sum(more) < sum(plain.operations[0]["silu"] for plain, _ in outcomes) * STEPS
    if not keep:
        assert len(set(more[::STEPS])) == 1  # all ranks decide alike


@pytest.mark.parametrize("keep", [True, False])
def test_only_dropped_tokens_are_sent_again(gloo_pool: GlooPool, keep: bool) -> None:
    """In float64: a token's two rows with their probabilities, each expert's count, and one number
    by which the ranks decide; nothing if they are kept."""
    plain, found = (
        gloo_pool.run(run_trial, 2, Trial(plugins=plugins, config={**MOE, **EP, **options}))
        for plugins, options in (
            ((), {}),
            (("moe-adaptive-recompute",), {SCALE: 0.0, KEEP: keep}),
        )
    )
    tokens, topk, hidden, item = 16, 2, 32, 8
    forwards = LAYERS * MICRO_BATCHES // 2
    more = {
        "alltoall_base_": forwards * tokens * topk * (hidden + 1) * item,
        "_allgather_base_": forwards * EXPERTS * item,
        "allreduce_": forwards * item,
    }
    for without, outcome in zip(plain, found, strict=True):
        sent = {
            name: nbytes - without.sent_bytes.get(name, 0)
            for name, nbytes in outcome.sent_bytes.items()
        }
        assert {name: n for name, n in sent.items() if n} == ({} if keep else more)
        assert outcome.metrics[RECOMPUTED] == forwards


@pytest.mark.exhaustive
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("scale", "first", "second"), [(1.9, 1, 0), (2.1, 0, 0)])
def test_only_crowded_experts_are_recomputed(
    gloo_pool: GlooPool, scale: float, first: int, second: int, keep: bool
) -> None:
    """All tokens are on two of four experts, those of the first rank: twice the mean."""
    values = {**EP, **BIASED, SCALE: scale, KEEP: keep}
    outcomes = run(gloo_pool, values, ranks=2, busy=2)
    forwards = LAYERS * STEPS * MICRO_BATCHES // 2
    for rank, (plain, found) in enumerate(outcomes):
        assert differences(found, plain) == []
        assert found.loads == plain.loads
        local = EXPERTS // 2
        more = sum(
            found.operations[at]["silu"] - plain.operations[at]["silu"] for at in range(STEPS)
        )
        expected = first if rank == 0 or not keep else second
        assert more == expected * forwards * local
