"""Runs with replicated experts against the run without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ascend_run.ops.experts.hot_experts import HotChoice
from ascend_run.plugin_api import AscendRunError
from ascend_run.plugins.experts.hot_experts import HotExperts, HotExpertsConfig
from ascend_run.testing.models import MOE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from tests.support.costs import planned
from tests.support.moe_memory import steps
from tests.support.needed_plugins import case
from tests.support.saved_tensors import expected_bytes
from tests.support.tiny_options import planned_with

from . import jobs

NAME: Final = "hot-experts"
NUMBER: Final = "plugins.hot-experts.num_experts"
FUSED: Final = "plugins.gmm.gradient_accumulation_fusion"
SHARED: Final = {"model.moe_shared_expert_intermediate_size": 24}
OVERLAPPED: Final = {**SHARED, "model.moe_shared_expert_overlap": True}
EP: Final = {"parallel.expert_model_parallel_size": 2}
LAYERS, GLOBAL_BATCH = 2, 4
LEVEL: Final = "plugins.moe-zero-memory.level"
FULL: Final = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}
MODULE: Final = {"model.recompute_granularity": "selective", "model.recompute_modules": ["moe"]}


@pytest.mark.exhaustive(by=lambda beside: beside)
@pytest.mark.parametrize(
    ("beside", "layout", "config", "number"),
    [
        ((), {"dp": 2, "ep": 2}, SHARED, 1),
        ((), {"dp": 2, "ep": 2}, {"model.add_bias_linear": True}, 2),
        ((), {"dp": 4, "ep": 4}, {"model.num_moe_experts": 8}, 2),
        ((), {"tp": 2, "ep": 2}, OVERLAPPED, 2),
        ((), {"pp": 2, "dp": 2, "ep": 2}, {}, 2),
        ((), {"dp": 2, "ep": 2}, {"model.moe_expert_capacity_factor": 1.0}, 2),
        case(("gmm",), {"dp": 2, "ep": 2}, {}, 2),
        case(("gmm",), {"dp": 4, "ep": 4}, {"model.num_moe_experts": 8}, 2),
        case(("moe-alltoall", "moe-permute-fusion"), {"dp": 2, "ep": 2}, OVERLAPPED, 2),
        case(("moe-zero-memory",), {"dp": 2, "ep": 2}, {}, 2),
    ],
    ids=str,
)
def test_it_keeps_loss_gradients_and_weights(
    parity: Parity,
    beside: tuple[str, ...],
    layout: dict[str, int],
    config: dict[str, Any],
    number: int,
) -> None:
    """Over several micro-batches, each with its own choice."""
    options = {NUMBER: number, FUSED: True}
    ranks = parity(NAME, beside=beside, model="moe", layout=layout, config=config, options=options)
    weights = 4 if "model.add_bias_linear" in config else 2
    forwards = GLOBAL_BATCH // layout.get("dp", 1) * LAYERS // layout.get("pp", 1)
    for outcome in ranks:
        replicas = outcome.metrics["hot-experts/replicas"]
        assert outcome.collectives.get("reduce_", 0) == forwards * replicas * weights
        assert 1 <= outcome.metrics["hot-experts/after"] <= outcome.metrics["hot-experts/before"]
    assert any(outcome.collectives["reduce_"] for outcome in ranks)


@pytest.mark.parametrize("beside", [(), case(("gmm",))], ids=["loop", "gmm"])
def test_all_tokens_may_have_one_expert(gloo_pool: GlooPool, beside: Any) -> None:
    """Two steps in float32; the experts of the second rank, and one of the first, are empty."""
    values = {
        **MOE,
        **EP,
        "model.family": "qwen3_moe",
        "model.moe_router_topk": 1,
        "model.moe_router_score_function": "sigmoid",
        "model.moe_router_enable_expert_bias": True,
        "model.moe_router_bias_update_rate": 0.0,
    }
    runs = [(beside, values), ((*beside, NAME), {**values, NUMBER: 2})]
    for plain, found in gloo_pool.run(steps, 2, runs, 1):
        assert [load > 0 for load in found.loads] == [True, False, False, False]
        assert found.weights.keys() == plain.weights.keys()
        torch.testing.assert_close(found.losses, plain.losses, rtol=1e-5, atol=0)
        for name, weight in plain.weights.items():
            error = (found.weights[name] - weight).abs().max() / weight.abs().max()
            assert error <= 1e-5, name


def test_checkpoints_are_those_of_a_run_without_it(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """A run resumes with replicas from a checkpoint that was made without, and saves the same
    tensors of weights and optimizer."""
    values = {**MOE, **EP, "checkpoint.save_interval": 1}
    runs = [((), "plain", 1), ((), "plain", 2), ((), "resumed", 1), ((NAME,), "resumed", 2)]
    options = {NUMBER: 2}
    made = [
        gloo_pool.run(
            run_trial,
            2,
            Trial(
                plugins=plugins,
                config={**values, **(options if plugins else {})},
                steps=number,
                checkpoints=str(tmp_path / folder),
            ),
        )
        for plugins, folder, number in runs
    ]
    for plain, resumed in zip(made[1], made[3], strict=True):
        assert resumed.state.keys() == plain.state.keys()
        for key, tensor in plain.state.items():
            torch.testing.assert_close(resumed.state[key], tensor, rtol=1e-4, atol=1e-6, msg=key)


def test_what_cannot_be_replicated_is_refused_in_one_message() -> None:
    settings = (
        "model.num_moe_experts=4",
        "model.moe_router_topk=2",
        "parallel.expert_model_parallel_size=2",
        "parallel.tensor_model_parallel_size=2",
        "parallel.expert_tensor_parallel_size=2",
        "parallel.sequence_parallel=true",
    )
    with pytest.raises(AscendRunError) as refused:
        planned_with(NAME, *settings, ranks=4)
    (line,) = [line for line in str(refused.value).splitlines() if "hot-experts:" in line]
    assert "num_experts=3 is more than the 2 experts of a rank; use at most 2" in line
    assert "expert_tensor_parallel_size=2 shards the experts" in line


def test_it_is_idle_with_all_experts_on_a_rank() -> None:
    assert {*planned_with(NAME).plan.idle} == {NAME}
    with pytest.raises(AscendRunError, match="moe_token_dispatcher_type=alltoall"):
        planned_with(NAME, "model.moe_token_dispatcher_type=allgather")


def test_padded_experts_are_refused() -> None:
    mixtral = ("model.family=mixtral", "model.num_moe_experts=4", "model.moe_router_topk=2")
    dropping = (*mixtral, "model.moe_expert_capacity_factor=1.0")
    assert planned_with(NAME, *dropping).config.model.moe_expert_capacity_factor == 1.0
    with pytest.raises(AscendRunError, match="padded experts have equal numbers of rows"):
        planned_with(NAME, *dropping, "model.moe_pad_expert_input_to_capacity=true")


@pytest.mark.needs_plugins("moe-allgather")
def test_the_allgather_dispatcher_is_refused_with_the_way_out() -> None:
    with pytest.raises(AscendRunError) as refused:
        planned_with(f"{NAME},moe-allgather", "model.num_moe_experts=4")
    assert "hot-experts needs alltoall; enable one of them" in str(refused.value)


@pytest.mark.exhaustive(by=lambda beside, repeated: (*beside, repeated))
@pytest.mark.parametrize(
    ("beside", "config", "repeated"),
    [
        ((), {}, 0),
        ((), {"model.add_bias_linear": True}, 0),
        ((), FULL, 1),
        ((), {**FULL, "model.recompute_method": "block"}, 0.5),
        ((), MODULE, 1),
        case(("moe-zero-memory",), {LEVEL: 0}, 1),
        case(("moe-zero-memory",), {LEVEL: 1, "plugins.moe-zero-memory.num_layers": 1}, 0.5),
    ],
    ids=["plain", "biases", "layers", "a layer", "module", "level 0", "level 1 in a layer"],
)
def test_communication_of_replicas_matches_the_plan(
    gloo_pool: GlooPool, beside: tuple[str, ...], config: dict[str, Any], repeated: float
) -> None:
    """In forwards with as many replicas as there may be, which is what ``plan`` counts. They are
    broadcast again where the experts are recomputed."""
    most = 2
    values = {**MOE, **EP, **config, "model.num_moe_experts": 8, NUMBER: most}
    plain = {key: value for key, value in values.items() if key != NUMBER}
    _, (cost,) = planned(values, (NAME, *beside), 2)
    sent = {c.operation: c.sent_bytes for c in cost.communication if "replicas" in c.why}
    numbers = 3 * 32 * 48 + (2 * 48 + 32 if "model.add_bias_linear" in config else 0)
    forwards = LAYERS * GLOBAL_BATCH // 2
    once = forwards * most * numbers * 4
    assert sent == {"broadcast": once * (1 + repeated), "reduce": once}
    trials = [
        Trial(plugins=beside, config=plain, steps=1),
        Trial(plugins=(NAME, *beside), config=values, steps=1),
    ]
    ranks = [gloo_pool.run(jobs.with_all_replicas, 2, trial) for trial in trials]
    for without, outcome in zip(*ranks, strict=True):
        assert outcome.sent_bytes["reduce_"] == sent["reduce"]
        others = without.sent_bytes.get("broadcast_", 0)
        assert outcome.sent_bytes["broadcast_"] - others == sent["broadcast"]


def test_replicas_are_in_the_memory_estimate() -> None:
    values = {**MOE, **EP, "model.num_moe_experts": 8, NUMBER: 2}
    _, (cost,) = planned(values, (NAME,), 2)
    (added,) = cost.changes[NAME].saved_added
    assert added.nbytes == 2 * 3 * 32 * 48 * 4
    (working,) = cost.changes[NAME].working
    assert working.nbytes == 3 * added.nbytes


@pytest.mark.parametrize(
    ("beside", "dropped"), [((), False), case(("moe-zero-memory",), True)], ids=["saved", "dropped"]
)
def test_saved_replicas_are_those_of_the_memory_estimate(
    gloo_pool: GlooPool, beside: tuple[str, ...], dropped: bool
) -> None:
    """``plan`` counts as many replicas as there may be. Together on both ranks, since the routing
    decides how much each saves."""
    most, replica = 2, 0 if dropped else 3 * 32 * 48 * 4
    values = {**MOE, **EP, "train.global_batch_size": 2, NUMBER: most}
    plain = {key: value for key, value in values.items() if key != NUMBER}
    plugins = (NAME, *beside)
    ranks = gloo_pool.run(jobs.saved, 2, [(beside, plain), (plugins, values)])
    (_, (without,)), (_, (cost,)) = planned(plain, beside, 2), planned(values, plugins, 2)
    planned_more = expected_bytes(cost) - expected_bytes(without)
    more = expected = 0.0
    for (saved, saved_more), replicas in ranks:
        assert replicas
        more += saved_more - saved
        expected += planned_more - replica * (most * LAYERS - replicas)
    assert more == expected


def test_forwards_between_steps_are_not_counted() -> None:
    """Those without gradients, such as of an evaluation or a text that the model writes."""
    plugin = HotExperts(HotExpertsConfig())
    choice = HotChoice(experts=(0,), rows_before=(4, 0), rows_after=(2, 2))
    with torch.no_grad():
        plugin._see(choice)
    assert plugin._readings(None) == {}  # type: ignore[arg-type]  # it reads no context
    plugin._see(choice)
    found = plugin._readings(None)  # type: ignore[arg-type]
    assert found == {"before": 2.0, "after": 1.0, "replicas": 1.0}
