"""Runs with overlapped all-to-alls against the run without them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from ascend_run.plugin_api import AscendRunError, Claim, Layout, LinkPlace, RunConfig
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.experts.moe_alltoall import MoeAlltoall, MoeAlltoallConfig
from ascend_run.testing.models import MOE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.moe_memory import steps
from tests.support.needed_plugins import case
from tests.support.saved_tensors import expected_bytes, saved_bytes
from tests.support.tiny_configs import model_fields, parallel_fields
from tests.support.tiny_options import planned_with

NAME = "moe-alltoall"
SHARED = {"model.moe_shared_expert_intermediate_size": 24}
OVERLAPPED = {**SHARED, "model.moe_shared_expert_overlap": True}
DROPS = {"model.moe_expert_capacity_factor": 0.8}
PADS = {**DROPS, "model.moe_pad_expert_input_to_capacity": True}
EXPERTS_ON_TWO = {"parallel.expert_model_parallel_size": 2}
RECOMPUTED = {
    "model.recompute_granularity": "selective",
    "model.recompute_modules": ["moe"],
}
BIASED = {
    "model.family": "qwen3_moe",
    "model.moe_router_topk": 3,
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_enable_expert_bias": True,
    "model.moe_router_bias_update_rate": 0.0,
}
LAYERS, GLOBAL_BATCH = 2, 4
CHUNKS = "plugins.moe-alltoall.overlap_chunks"
BUSY = {CHUNKS: 2, "model.moe_router_topk": 13}
"""Of sixteen experts: each token has one in each chunk of four."""
FUSED = {"plugins.gmm.gradient_accumulation_fusion": True}


@pytest.mark.exhaustive(by=lambda beside: beside)
@pytest.mark.parametrize(
    ("beside", "layout", "config"),
    [
        ((), {"dp": 2, "ep": 2}, SHARED),
        ((), {"dp": 2, "ep": 2}, {**OVERLAPPED, "model.moe_shared_expert_gate": True}),
        ((), {"tp": 2, "ep": 2}, OVERLAPPED),
        ((), {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}, OVERLAPPED),
        ((), {"dp": 4, "ep": 4}, {"model.num_moe_experts": 32}),
        ((), {"dp": 2, "ep": 2}, {**OVERLAPPED, **DROPS}),
        ((), {"pp": 2, "dp": 2, "ep": 2}, {**OVERLAPPED, **PADS}),
        case(("moe-permute-fusion",), {"pp": 2, "dp": 2, "ep": 2}, OVERLAPPED),
        case(("gmm", "moe-permute-fusion"), {"dp": 2, "ep": 2}, OVERLAPPED),
    ],
    ids=str,
)
def test_it_keeps_loss_gradients_and_weights(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int], config: dict[str, Any]
) -> None:
    """The campaign ``together`` has every pair, without expert tensor parallelism. Tensor
    parallelism changes which tokens are dropped; ``tests/ops/experts/test_routed_layer.py`` has it.
    """
    parity(NAME, beside=beside, model="moe", layout=layout, config=config)


def test_recomputed_layers_are_dispatched_again(parity: Parity) -> None:
    parity(NAME, model="moe", layout={"dp": 2, "ep": 2}, config=RECOMPUTED)


@pytest.mark.exhaustive(by=lambda beside, config: (*beside, config is RECOMPUTED))
@pytest.mark.parametrize(
    ("beside", "layout", "config"),
    [
        ((), {"dp": 2, "ep": 2}, OVERLAPPED),
        ((), {"dp": 2, "ep": 2}, {"model.add_bias_linear": True}),
        ((), {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}, {}),
        ((), {"dp": 4, "ep": 4}, {"model.num_moe_experts": 12}),
        ((), {"dp": 2, "ep": 2}, DROPS),
        ((), {"pp": 2, "dp": 2, "ep": 2}, {**PADS, "model.num_moe_experts": 8}),
        ((), {"dp": 2, "ep": 2}, RECOMPUTED),
        case(("gmm", "moe-permute-fusion"), {"dp": 2, "ep": 2}, {"model.num_moe_experts": 6}),
    ],
    ids=str,
)
def test_chunks_keep_loss_gradients_and_weights(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int], config: dict[str, Any]
) -> None:
    """Over several micro-batches, and with gmm into the summed gradient of the stacked weights."""
    options = {CHUNKS: 2, **(FUSED if "gmm" in beside else {})}
    ranks = parity(NAME, beside=beside, model="moe", layout=layout, config=config, options=options)
    forwards = GLOBAL_BATCH // layout.get("dp", 1) * LAYERS // layout.get("pp", 1)
    repeated = 2 if config is RECOMPUTED else 1
    for outcome in ranks:
        assert outcome.collectives["alltoall_base_"] == 2 * 3 * (1 + repeated) * forwards


@pytest.mark.needs_plugins("moe-permute-fusion")
def test_chunks_are_bitwise_equal_to_one_exchange(gloo_pool: GlooPool) -> None:
    """With the loop over experts, and a permutation that adds the rows of a token in the order of
    its experts. Two experts of the first rank have all tokens but a third of them."""
    values = {**MOE, **EXPERTS_ON_TWO, **BIASED, "model.num_moe_experts": 8}
    runs = [(("moe-permute-fusion", NAME), {**values, CHUNKS: chunks}) for chunks in (1, 3)]
    for whole, chunked in gloo_pool.run(steps, 2, runs, 2):
        assert chunked.loads == whole.loads
        assert chunked.losses == whole.losses
        assert chunked.weights.keys() == whole.weights.keys()
        for name, weight in whole.weights.items():
            assert torch.equal(chunked.weights[name], weight), name


@pytest.mark.needs_plugins("hot-experts", "moe-zero-memory")
def test_chunks_that_cannot_be_are_refused_in_one_message() -> None:
    names = f"{NAME},hot-experts,moe-zero-memory"
    settings = (
        "model.family=mixtral",
        "model.num_moe_experts=4",
        "train.global_batch_size=2",
        "parallel.expert_model_parallel_size=2",
    )
    with pytest.raises(AscendRunError) as refused:
        planned_with(names, *settings, "plugins.hot-experts.num_experts=1", f"{CHUNKS}=3", ranks=2)
    (line,) = [line for line in str(refused.value).splitlines() if f"{NAME}:" in line]
    assert "overlap_chunks=3 is more than the 2 experts of a rank; use at most 2" in line
    assert "and hot-experts and moe-zero-memory expect one; set it to 1" in line
    for least in (1, 2):  # as many as there are experts, and no check where it is idle
        planned_with(NAME, *settings, f"{CHUNKS}={least}", ranks=2)
    assert {*planned_with(NAME, f"{CHUNKS}=9").plan.idle} == {NAME}


def test_chunks_are_refused_beside_any_plugin_that_wraps_experts() -> None:
    """By what it declares, whichever it is."""
    config = RunConfig(
        model=model_fields({"num_moe_experts": 4}),
        parallel=parallel_fields({"expert_model_parallel_size": 2}),
    )
    layout = Layout(world_size=2, ep=2)
    plugin = MoeAlltoall(MoeAlltoallConfig(overlap_chunks=2))
    for place, refused in ((LinkPlace.AROUND, True), (LinkPlace.COMPILER, False)):
        other = attrs.evolve(MoeAlltoall.manifest, name="other", forward_links={"experts": place})
        given = [MoeAlltoall.manifest, other]
        problems = plugin.ascend_check(config=config, layout=layout, manifests=given)
        assert ["and other expect one" in text for text in problems] == [True] * refused


def test_it_claims_the_dispatcher_and_is_idle_with_all_experts_on_a_rank() -> None:
    assert claims_of(MoeAlltoall) == (Claim.TOKEN_DISPATCHER,)
    assert {*planned_with(NAME).plan.idle} == {NAME}
    with pytest.raises(AscendRunError, match="moe_token_dispatcher_type=alltoall"):
        planned_with(NAME, "model.moe_token_dispatcher_type=allgather")


@pytest.mark.exhaustive(by=lambda config: config)
@pytest.mark.parametrize(
    "config",
    [SHARED, OVERLAPPED, PADS, BUSY, {**OVERLAPPED, **BUSY}],
    ids=["shared", "overlapped", "padded", "chunks", "chunks and shared"],
)
def test_communication_matches_the_cost_model(gloo_pool: GlooPool, config: dict[str, Any]) -> None:
    longer = {"data.seq_length": 64, "model.num_moe_experts": 16}  # more than a few numbers
    values = {**MOE, **longer, **config, **EXPERTS_ON_TWO}
    assert differences(gloo_pool, values, (NAME,)) == []


def test_all_to_alls_are_overlapped_if_shared_experts_are() -> None:
    for config, hidden in ((SHARED, False), (OVERLAPPED, True)):
        _, (cost,) = planned({**MOE, **config, **EXPERTS_ON_TWO}, (NAME,), 2)
        found = [c.overlapped for c in cost.communication if c.operation == "all_to_all"]
        assert len(found) == 4
        assert {*found} == {hidden}


def test_exchanges_in_chunks_are_overlapped_but_for_the_ends() -> None:
    """Two of five experts are in the first of two chunks, and three in the last."""
    alone = {"tokens": 1 / 2, "weights": 2 / 5}
    values = {**MOE, "model.num_moe_experts": 10, **EXPERTS_ON_TWO}
    _, (whole,) = planned(values, (NAME,), 2)
    _, (cost,) = planned({**values, CHUNKS: 2}, (NAME,), 2)
    for plain in (c for c in whole.communication if c.operation == "all_to_all"):
        exposed, hidden = (
            [c for c in cost.communication if c.why == plain.why and c.overlapped is overlapped]
            for overlapped in (False, True)
        )
        assert [c.calls for c in exposed] == [c.calls for c in hidden] == [plain.calls]
        share = alone[plain.why.rpartition(" ")[2]]
        assert exposed[0].sent_bytes == pytest.approx(share * plain.sent_bytes)
        assert hidden[0].sent_bytes == pytest.approx((1 - share) * plain.sent_bytes)
    _, (cost,) = planned({**values, **OVERLAPPED, CHUNKS: 2}, (NAME,), 2)
    assert all(c.overlapped for c in cost.communication if c.operation == "all_to_all")


@pytest.mark.exhaustive
@pytest.mark.parametrize("others", [(), ("moe-permute-fusion",)], ids=str)
@pytest.mark.parametrize("factor", [None, 1.0], ids=str)
def test_saved_indices_are_in_the_memory_estimate(
    gloo_pool: GlooPool, factor: float | None, others: tuple[str, ...]
) -> None:
    """Together on both ranks, since the routing decides how much each saves."""
    values = {**MOE, **EXPERTS_ON_TWO, "train.global_batch_size": 2}
    if factor is not None:
        values |= {**PADS, "model.moe_expert_capacity_factor": factor}
    runs = [(others, values), ((*others, NAME), values)]
    measured = [plugin - plain for plain, plugin in gloo_pool.run(saved_bytes, 2, runs)]
    plain, plugin = (expected_bytes(planned(config, names, 2)[1][0]) for names, config in runs)
    assert sum(measured) == 2 * (plugin - plain)


def test_indices_of_rows_on_every_rank_of_an_expert_are_in_the_estimate(
    gloo_pool: GlooPool,
) -> None:
    shared = {
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
        "parallel.expert_tensor_parallel_size": 2,
        "train.global_batch_size": 2,
    }
    runs = [
        ((), {**MOE, **EXPERTS_ON_TWO, **shared}),
        ((NAME,), {**MOE, **EXPERTS_ON_TWO, **shared}),
    ]
    measured = [plugin - plain for plain, plugin in gloo_pool.run(saved_bytes, 4, runs)]
    plain, plugin = (expected_bytes(planned(config, names, 4)[1][0]) for names, config in runs)
    assert sum(measured) == 4 * (plugin - plain)


@pytest.mark.parametrize("config", [{}, {"model.num_moe_experts": 8}, PADS], ids=str)
def test_chunks_save_what_one_exchange_does(gloo_pool: GlooPool, config: dict[str, Any]) -> None:
    values = {**MOE, **EXPERTS_ON_TWO, "train.global_batch_size": 2, **config}
    runs = [((NAME,), {**values, CHUNKS: chunks}) for chunks in (1, 2)]
    whole, chunked = (sum(each) for each in zip(*gloo_pool.run(saved_bytes, 2, runs), strict=True))
    assert whole == chunked
    costs = [planned(values, names, 2)[1][0] for names, values in runs]
    assert expected_bytes(costs[0]) == expected_bytes(costs[1])
