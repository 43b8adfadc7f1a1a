"""Runs with moe-zero-memory against the run without it: bitwise equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.testing.models import MOE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from tests.support.moe_memory import Stepped, differences, steps

LEVEL: Final = "plugins.moe-zero-memory.level"
EXPERTS, LAYERS, MICRO_BATCHES = 4, 2, 4
SHARED: Final = {"model.moe_shared_expert_intermediate_size": 24}
GATED: Final = {**SHARED, "model.moe_shared_expert_gate": True}
NARROW: Final = {"model.moe_ffn_hidden_size": 8}
"""So narrow that level 0 keeps the tokens of every other layer."""
SEQUENCE: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
EP: Final = {"parallel.expert_model_parallel_size": 2}
EXPERT_TP: Final = {"parallel.expert_tensor_parallel_size": 2}
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
BY_ONEDNN: Final = {"train.precision": "fp32", "plugins.cpu.fp32_matmul_library": "onednn"}
FUSED: Final = {"plugins.gmm.gradient_accumulation_fusion": True, "plugins.gmm.backend": "loop"}


def run(
    pool: GlooPool,
    values: Mapping[str, Any],
    *,
    level: int,
    beside: tuple[str, ...] = (),
    ranks: int = 1,
    busy: int = 0,
    drops: bool = False,
) -> list[list[Stepped]]:
    """Return, for each rank, the run without the plugin and the one with it."""
    config = {**MOE, **values}
    if config["model.moe_router_topk"] == 1:
        config["model.family"] = "qwen3_moe"  # mixtral selects two
    return pool.run(
        steps,
        ranks,
        [(beside, config), ((*beside, "moe-zero-memory"), {**config, LEVEL: level})],
        busy,
        drops,
    )


@pytest.mark.parametrize("level", [0, 1])
def test_gradients_and_weights_are_those_of_the_plain_run(parity: Parity, level: int) -> None:
    (outcome,) = parity(
        "moe-zero-memory", model="moe", options={LEVEL: level}, config={**SHARED, **NARROW}
    )
    assert outcome.operations["silu"] == 2 * MICRO_BATCHES * LAYERS * (EXPERTS + 1)


def test_tokens_of_padded_experts_are_dispatched_again(parity: Parity) -> None:
    pads = {
        "model.moe_expert_capacity_factor": 0.8,
        "model.moe_pad_expert_input_to_capacity": True,
    }
    layout = {"dp": 2, "ep": 2}
    parity("moe-zero-memory", model="moe", layout=layout, options={LEVEL: 1}, config=pads)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_no_bit_changes_in_half_precision_with_dropout(
    gloo_pool: GlooPool, precision: str, level: int
) -> None:
    values = {**DROPOUT, **GATED, **NARROW, "train.precision": precision}
    ((plain, found),) = run(gloo_pool, values, level=level)
    assert differences(found, plain) == []
    assert found.operations[0]["silu"] == 2 * plain.operations[0]["silu"]


def test_the_forward_is_repeated_up_to_the_input_of_its_last_matmul(gloo_pool: GlooPool) -> None:
    ((plain, found),) = run(gloo_pool, {}, level=1)
    assert differences(found, plain) == []
    repeated = MICRO_BATCHES * LAYERS * (2 * EXPERTS - 1)
    assert found.operations[0]["mm"] - plain.operations[0]["mm"] == repeated


@pytest.mark.needs_plugins("gmm")
@pytest.mark.exhaustive
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("more", [{}, {"plugins.gmm.backend": "bmm"}], ids=str)
def test_no_bit_changes_with_grouped_matmuls(
    gloo_pool: GlooPool, more: Mapping[str, Any], level: int
) -> None:
    values = {**NARROW, **more, "train.precision": "bf16"}
    ((plain, found),) = run(gloo_pool, values, level=level, beside=("gmm",))
    assert differences(found, plain) == []
    assert found.operations[0]["silu"] > plain.operations[0]["silu"]


@pytest.mark.needs_plugins("gmm")
@pytest.mark.parametrize("level", [0, 1])
def test_no_bit_changes_with_matmuls_of_onednn(gloo_pool: GlooPool, level: int) -> None:
    ((plain, found),) = run(gloo_pool, {**NARROW, **BY_ONEDNN}, level=level, beside=("gmm",))
    assert differences(found, plain) == []


@pytest.mark.exhaustive(by=lambda level: [level] if level == 1 else [])
@pytest.mark.needs_plugins("gmm")
@pytest.mark.parametrize("level", [0, 1])
def test_gradients_are_still_added_to_their_buffer(gloo_pool: GlooPool, level: int) -> None:
    values = {**NARROW, **FUSED, **EP}
    for plain, found in run(gloo_pool, values, level=level, beside=("gmm",), ranks=2):
        assert differences(found, plain) == []
        assert found.operations[0]["addmm_"] == plain.operations[0]["addmm_"] > 0


@pytest.mark.exhaustive(by=lambda ranks, level: [level] if ranks == 2 else [])
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param({**EP, **NARROW}, 2, id="ep"),
        pytest.param({**SEQUENCE, **GATED}, 2, id="tp-sequence-shared"),
        pytest.param({**SEQUENCE, **EXPERT_TP, **NARROW}, 2, id="expert-tp"),
        pytest.param(
            {**SEQUENCE, **EXPERT_TP, **EP, "model.moe_token_dispatcher_type": "allgather"},
            4,
            id="expert-tp-ep-gathered",
        ),
        pytest.param(
            {
                "parallel.pipeline_model_parallel_size": 2,
                "parallel.virtual_pipeline_model_parallel_size": 2,
                "model.num_layers": 4,
                **NARROW,
            },
            2,
            id="virtual-pipeline",
        ),
    ],
)
def test_no_bit_changes_on_several_ranks(
    gloo_pool: GlooPool, values: Mapping[str, Any], ranks: int, level: int
) -> None:
    for plain, found in run(gloo_pool, values, level=level, ranks=ranks):
        assert differences(found, plain) == []
        assert found.operations[0]["silu"] > plain.operations[0]["silu"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(("busy", "ranks"), [(1, 1), (2, 2)])
def test_experts_and_ranks_may_have_no_tokens(
    gloo_pool: GlooPool, busy: int, ranks: int, level: int
) -> None:
    """All tokens on one expert; and on those of the first rank, so that the second has none."""
    values = {
        **(EP if ranks == 2 else {}),
        **NARROW,
        "model.moe_router_topk": busy,
        "model.moe_router_score_function": "sigmoid",
        "model.moe_router_enable_expert_bias": True,
        "model.moe_router_bias_update_rate": 0.0,
    }
    for plain, found in run(gloo_pool, values, level=level, ranks=ranks, busy=busy):
        assert differences(found, plain) == []
        assert found.loads == plain.loads
        assert [load > 0 for load in found.loads] == [at < busy for at in range(EXPERTS)]


@pytest.mark.exhaustive(by=lambda level: [level] if level == 1 else [])
@pytest.mark.parametrize("level", [0, 1])
def test_a_kernel_that_drops_tokens_draws_the_same_ones_again(
    gloo_pool: GlooPool, level: int
) -> None:
    for plain, found in run(gloo_pool, EP, level=level, ranks=2, drops=True):
        assert differences(found, plain) == []
