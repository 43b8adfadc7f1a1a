"""The plugin's declarations, errors and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.plugin_api import Numerics, RunConfig
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.moe_zero_memory import MoeZeroMemory, MoeZeroMemoryConfig
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.tiny_configs import model_fields, parallel_fields

SEQUENCE = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
EP = {"parallel.expert_model_parallel_size": 2}
EXPERT_TP = {"parallel.expert_tensor_parallel_size": 2}
GATED = {"model.moe_shared_expert_intermediate_size": 48, "model.moe_shared_expert_gate": True}
LEVEL = "plugins.moe-zero-memory.level"


def problems(**model: Any) -> str:
    run = RunConfig(
        model=model_fields({"num_layers": 8, "num_moe_experts": 4, **model}),
        parallel=parallel_fields(),
    )
    plugin = MoeZeroMemory(MoeZeroMemoryConfig())
    return "; ".join(plugin.ascend_check(config=run))


def test_it_claims_nothing_and_changes_no_bit() -> None:
    assert claims_of(MoeZeroMemory) == ()
    assert MoeZeroMemory.manifest.numerics is Numerics.BITWISE


def test_what_replicates_experts_is_within_what_it_recomputes() -> None:
    """Whatever the names are by which plugins are sorted otherwise."""
    assert "hot-experts" in MoeZeroMemory.manifest.after


@pytest.mark.parametrize("options", [{"level": 2}, {"level": -1}, {"num_layers": 0}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        MoeZeroMemoryConfig(**options)


def test_experts_are_not_recomputed_twice() -> None:
    assert problems() == ""
    assert "recompute_granularity=full" in problems(recompute_granularity="full")
    selective = {"recompute_granularity": "selective"}
    assert problems(**selective, recompute_modules=["core_attn"]) == ""
    refused = problems(**selective, recompute_modules=["shared_experts", "moe"])
    assert "model.recompute_modules names moe and shared_experts" in refused
    assert problems(num_moe_experts=None, recompute_granularity="full") == ""


def test_shared_experts_within_the_dispatcher_are_refused() -> None:
    assert "moe_shared_expert_overlap=true" in problems(moe_shared_expert_overlap=True)


@pytest.mark.exhaustive(by=lambda values: values)
@pytest.mark.parametrize(
    "values",
    [
        pytest.param({**EP, LEVEL: 1}, id="ep"),
        pytest.param({**SEQUENCE, **EP, **GATED, LEVEL: 0}, id="ep-tp-shared-experts"),
        pytest.param({**SEQUENCE, **EXPERT_TP, LEVEL: 1}, id="expert-tp"),
        pytest.param(
            {
                **SEQUENCE, **EXPERT_TP, **EP, LEVEL: 1,
                "model.moe_token_dispatcher_type": "allgather",
            },
            id="expert-tp-ep-gathered",
        ),
    ],
)  # fmt: skip
def test_a_step_sends_what_was_expected(gloo_pool: GlooPool, values: Mapping[str, Any]) -> None:
    longer = {"data.seq_length": 64, "model.num_moe_experts": 16}
    assert differences(gloo_pool, {**MOE, **longer, **values}, ("moe-zero-memory",)) == []


def test_named_layers_change_and_the_others_do_not() -> None:
    _, (plain,) = planned(MOE)
    _, (cost,) = planned({**MOE, "plugins.moe-zero-memory.num_layers": 1}, ("moe-zero-memory",))
    change = cost.changes["moe-zero-memory"]
    assert [one.layers for one in change.saved] == [(0,)]
    assert change.saved_added_layers == (0,), "it keeps its tokens"
    experts = 3 * 32 * 48 * 2  # weights of the experts that a token selects
    assert cost.flops - plain.flops == 2 * experts * 16 * 4
    assert "moe-zero-memory" not in planned(DENSE, ("moe-zero-memory",))[1][0].changes
