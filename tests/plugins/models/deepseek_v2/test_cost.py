"""The cost in ``plan`` of multi-latent attention, against the built model and its communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from ascend_run.tools.plan.cost_model.flops import attention_flops, scores_flops
from ascend_run.tools.plan.cost_model.names import parameter_key
from ascend_run.tools.plan.cost_model.sizes import sizes_of
from benchmarks.memory_case import Case
from benchmarks.memory_prediction import TOLERANCE, compare, is_exact
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.latent_models import DENSE, MODEL
from tests.tools.plan.cost_model.cost_jobs import built_and_counted, count_flops

TENSORS = {"parallel.tensor_model_parallel_size": 2}
SHARED = {**TENSORS, "parallel.sequence_parallel": True}
AS_PLANNED = {"platform": "cpu"}
"""Operators are counted there: in float64, attention on a GPU is plain matmuls."""
LONGER = {"data.seq_length": 64, "model.num_moe_experts": 16}


@pytest.mark.parametrize("config", [MODEL, DENSE], ids=["latent queries", "plain queries"])
def test_flops_are_what_torch_counts_in_a_step(
    gloo_pool: GlooPool, config: Mapping[str, Any]
) -> None:
    """The attention runs in the width of keys; the part of the values is counted in their own
    width."""
    prepared, (cost,) = planned(config)
    sizes = sizes_of(prepared.config, prepared.layout)
    ((products, unmasked),) = gloo_pool.run(count_flops, 1, Trial(config={**config, **AS_PLANNED}))
    passes = config["model.num_layers"] * config["train.global_batch_size"]
    again = scores_flops(prepared.config, sizes, 0) * passes
    attention = 3 * attention_flops(prepared.config, sizes, 0) * passes + again
    assert cost.flops - attention == products
    assert cost.model_flops == cost.flops - again
    length, key, value = config["data.seq_length"], sizes.head_width, sizes.value_width
    seen = unmasked * (length + 1) / (2 * length)
    assert attention == pytest.approx(seen * (4 * key + 3 * value) / (7 * key))


@pytest.mark.exhaustive(by=lambda plugins: [bool(plugins)])
@pytest.mark.parametrize(
    ("config", "plugins"),
    [
        pytest.param({**MODEL, **LONGER, **SHARED}, (), id="sequence parallel"),
        pytest.param({**DENSE, **TENSORS, "data.seq_length": 64}, (), id="tensors alone"),
        *(
            pytest.param(
                {**MODEL, **LONGER, **SHARED, "parallel.context_parallel_size": 2},
                (plugin,),
                marks=pytest.mark.needs_plugins(plugin),
                id=plugin,
            )
            for plugin in ("ulysses", "ring-attention")
        ),
    ],
)
def test_a_step_sends_what_was_expected(
    gloo_pool: GlooPool, config: Mapping[str, Any], plugins: tuple[str, ...]
) -> None:
    assert differences(gloo_pool, config, plugins) == []


def test_operations_are_about_as_many_as_torch_dispatches(gloo_pool: GlooPool) -> None:
    _, (cost,) = planned(MODEL)
    (outcome,) = gloo_pool.run(run_trial, 1, Trial(config={**MODEL, **AS_PLANNED}))
    assert cost.operations == pytest.approx(sum(outcome.operations.values()), rel=0.1)


@pytest.mark.parametrize("config", [MODEL, DENSE], ids=["latent queries", "plain queries"])
def test_names_have_the_keys_of_what_is_counted(
    gloo_pool: GlooPool, config: Mapping[str, Any]
) -> None:
    ((names, counted),) = gloo_pool.run(built_and_counted, 1, dict(config))
    assert Counter({name: parameter_key(name) for name in names}.values()) == counted


WIDE = {
    "model.num_layers": 4,
    "model.moe_layer_freq": [0, 1, 1, 1],
    "model.hidden_size": 64,
    "model.ffn_hidden_size": 176,
    "model.q_lora_rank": 48,
    "model.kv_lora_rank": 32,
    "model.qk_head_dim": 16,
    "model.qk_pos_emb_head_dim": 8,
    "model.v_head_dim": 16,
    "data.seq_length": 128,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 4,
}
CASES = {
    "experts": Case(name="latent", values={**MODEL, **WIDE}),
    "dense": Case(
        name="latent",
        values={
            **DENSE,
            **{k: v for k, v in WIDE.items() if k not in ("model.moe_layer_freq",)},
            "model.q_lora_rank": None,
            "model.v_head_dim": 24,
        },
    ),
    "sequence parallel": Case(name="latent", ranks=2, values={**MODEL, **WIDE, **SHARED}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_run_takes_the_memory_that_was_expected(gloo_pool: GlooPool, case: Case) -> None:
    for row in compare(case, gloo_pool):
        assert is_exact(row), row
        assert abs(row["off"]) <= TOLERANCE, row
