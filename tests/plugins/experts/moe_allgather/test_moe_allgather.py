"""Runs with the all-gather dispatcher against the run without it."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import AscendRunError, Claim
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.experts.moe_allgather import MoeAllgather
from ascend_run.testing.models import MOE
from ascend_run.testing.parity import Case, Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.needed_plugins import case
from tests.support.saved_tensors import expected_bytes, saved_bytes
from tests.support.tiny_options import planned_with

from .jobs import events

NAME = "moe-allgather"
GATHER = {"model.moe_token_dispatcher_type": "allgather"}
SHARED = {"model.moe_shared_expert_intermediate_size": 24}
DROPS = {"model.moe_expert_capacity_factor": 0.8}
RECOMPUTED = {"model.recompute_granularity": "selective", "model.recompute_modules": ["moe"]}
CHUNKS = "plugins.moe-allgather.overlap_chunks"
BESIDE_SHARED = {"plugins.moe-allgather.overlap_shared_experts": True}
FUSED = {"plugins.gmm.gradient_accumulation_fusion": True}
EP = {"dp": 2, "ep": 2}


@pytest.mark.exhaustive(by=lambda beside, layout: (*beside, *layout))
@pytest.mark.parametrize(
    ("beside", "layout", "config"),
    [
        ((), {}, {}),
        ((), {"dp": 2, "ep": 2}, {"model.moe_shared_expert_intermediate_size": 24}),
        ((), {"tp": 2, "ep": 2}, {}),
        ((), {"dp": 2, "ep": 2}, {"model.moe_expert_capacity_factor": 0.8}),
        ((), {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}, {}),
        case(("gmm",), {"dp": 4, "ep": 4}, {"model.num_moe_experts": 32}),
    ],
    ids=str,
)
def test_it_keeps_loss_gradients_and_weights(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int], config: dict[str, Any]
) -> None:
    """The campaign ``together`` has every pair, without expert tensor parallelism."""
    parity(NAME, beside=beside, model="moe", layout=layout, config={**GATHER, **config})


@pytest.mark.exhaustive(by=lambda beside, config: (*beside, config is RECOMPUTED))
@pytest.mark.parametrize(
    ("beside", "layout", "config"),
    [
        ((), EP, {**SHARED, **BESIDE_SHARED}),
        ((), {"tp": 2, "ep": 2}, {**SHARED, **BESIDE_SHARED}),
        ((), {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}, {}),
        ((), {"pp": 2, **EP}, {"model.add_bias_linear": True}),
        ((), EP, DROPS),
        ((), EP, RECOMPUTED),
        case(("gmm",), EP, FUSED),
    ],
    ids=str,
)
def test_chunks_keep_loss_gradients_and_weights(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int], config: dict[str, Any]
) -> None:
    """Chunks of different sizes, and with gmm into the summed gradient of the weights."""
    settings = {**GATHER, **config}
    options = {CHUNKS: 3, **{k: settings.pop(k) for k in config if k.startswith("plugins.")}}
    parity(NAME, beside=beside, model="moe", layout=layout, config=settings, options=options)


@pytest.mark.exhaustive(by=lambda beside: beside)
@pytest.mark.parametrize(
    ("beside", "layout", "config"),
    [
        ((), EP, {"model.moe_shared_expert_gate": True}),
        ((), {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}, {}),
        ((), EP, {**RECOMPUTED, "model.recompute_modules": ["shared_experts"]}),
        case(("moe-zero-memory",), EP, {}),
    ],
    ids=str,
)
def test_deferred_shared_experts_keep_loss_gradients_and_weights(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int], config: dict[str, Any]
) -> None:
    config = {**GATHER, **SHARED, **config}
    options = {**BESIDE_SHARED}
    if beside:
        options["plugins.moe-zero-memory.level"] = 1
    parity(NAME, beside=beside, model="moe", layout=layout, config=config, options=options)


FORWARD = ["issue", "issue", "wait", "wait", "issue", "wait"]
BACKWARD = ["issue", "wait", "issue", "issue", "wait", "wait"]


@pytest.mark.parametrize("deferred", [False, True], ids=["before", "deferred"])
def test_shared_experts_are_computed_while_outputs_are_exchanged(
    gloo_pool: GlooPool, deferred: bool
) -> None:
    """In a run, by the layer itself."""
    values = {**MOE, **GATHER, **SHARED, "parallel.expert_model_parallel_size": 2}
    if deferred:
        values |= BESIDE_SHARED
        expected = [*FORWARD[:-1], "shared", FORWARD[-1]]
    else:
        expected = ["shared", *FORWARD]
    layers, microbatches = 2, 2
    for log in gloo_pool.run(events, 2, Trial(plugins=(NAME,), config=values, counted=False)):
        assert log == (expected * layers + BACKWARD * layers) * microbatches


def test_fewer_bytes_are_gathered_and_nothing_is_added_by_index(parity: Parity) -> None:
    layout, experts = {"dp": 2, "ep": 2}, {"model.num_moe_experts": 32}
    outcomes = parity(NAME, model="moe", layout=layout, config={**GATHER, **experts})
    plain = parity.outcomes(
        Case(plugins=(), model="moe", layout=layout, config={**GATHER, **experts})
    )
    for outcome, without in zip(outcomes, plain, strict=True):
        names = ("_allgather_base_", "_reduce_scatter_base_")
        assert all(outcome.sent_bytes[name] < without.sent_bytes[name] for name in names)
        assert outcome.collectives == without.collectives
        assert outcome.operations.get("scatter_add_", 0) < without.operations["scatter_add_"]


def test_it_claims_the_dispatcher_and_is_idle_without_experts() -> None:
    assert claims_of(MoeAllgather) == (Claim.TOKEN_DISPATCHER,)
    gather = "model.moe_token_dispatcher_type=allgather"
    assert {*planned_with(NAME, gather).plan.idle} == {NAME}
    with pytest.raises(AscendRunError, match=gather):
        planned_with(NAME)
    assert {*MoeAllgather.manifest.conflicts} == {"moe-permute-fusion"}
    padded = (gather, "model.moe_expert_capacity_factor=1.0")
    with pytest.raises(AscendRunError, match="moe_pad_expert_input_to_capacity=false"):
        planned_with(NAME, *padded, "model.moe_pad_expert_input_to_capacity=true")


@pytest.mark.needs_plugins("moe-zero-memory")
def test_chunks_that_cannot_be_are_refused_in_one_message() -> None:
    settings = (
        "model.family=mixtral",
        "model.num_moe_experts=4",
        "model.moe_token_dispatcher_type=allgather",
        "data.seq_length=16",
        "train.micro_batch_size=2",
        "train.global_batch_size=4",
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
        "parallel.expert_model_parallel_size=2",
    )
    with pytest.raises(AscendRunError) as refused:
        planned_with(f"{NAME},moe-zero-memory", *settings, f"{CHUNKS}=17", ranks=2)
    (line,) = [line for line in str(refused.value).splitlines() if f"{NAME}:" in line]
    assert "overlap_chunks=17 is more than the 16 tokens of a rank; use at most 16" in line
    assert "and moe-zero-memory expect one; set it to 1" in line
    planned_with(NAME, *settings, f"{CHUNKS}=16", ranks=2)
    planned_with(f"{NAME},moe-zero-memory", *settings, f"{CHUNKS}=1", ranks=2)
    planned_with(NAME, *settings[:-1], f"{CHUNKS}=17", ranks=2)  # all experts are on each rank


@pytest.mark.exhaustive(by=lambda ranks, config: [ranks, *config])
@pytest.mark.parametrize(
    ("ranks", "config"),
    [(2, {}), (4, {}), (2, {CHUNKS: 3}), (2, {**SHARED, **BESIDE_SHARED, CHUNKS: 2})],
    ids=str,
)
def test_communication_matches_the_cost_model(
    gloo_pool: GlooPool, ranks: int, config: dict[str, Any]
) -> None:
    longer = {"data.seq_length": 64, "model.num_moe_experts": 16}  # more than a few numbers
    layout = {"parallel.expert_model_parallel_size": ranks}
    assert differences(gloo_pool, {**MOE, **GATHER, **longer, **layout, **config}, (NAME,)) == []


def test_exchanges_are_overlapped_but_for_the_ends() -> None:
    """Five of sixteen tokens are in the first of three chunks, and six in the last."""
    values = {**MOE, **GATHER, "parallel.expert_model_parallel_size": 2}
    values |= {"data.seq_length": 16, "train.micro_batch_size": 1}
    tokens, outputs = (
        [("forward", "tokens"), ("backward", "tokens")],
        [
            ("forward", "outputs"),
            ("backward", "outputs"),
        ],
    )

    def exposed(config: dict[str, Any]) -> dict[tuple[str, str], float]:
        """Return the share of the bytes of each exchange that nothing is behind."""
        _, (cost,) = planned({**values, **config}, (NAME,), 2)
        found: dict[tuple[str, str], float] = {}
        for name in (*tokens, *outputs):
            own = [c for c in cost.communication if c.why == f"experts, {name[0]}: {name[1]}"]
            alone = sum(c.sent_bytes for c in own if not c.overlapped)
            found[name] = alone / sum(c.sent_bytes for c in own)
        return found

    ends = {**dict.fromkeys(tokens, 5 / 16), **dict.fromkeys(outputs, 6 / 16)}
    assert exposed({}) == exposed(BESIDE_SHARED) == dict.fromkeys(ends, 1.0)
    assert exposed({CHUNKS: 3}) == pytest.approx(ends)
    shared = exposed({**SHARED, **BESIDE_SHARED})
    assert shared == {**dict.fromkeys(tokens, 1.0), **dict.fromkeys(outputs, 0.0)}
    both = exposed({**SHARED, **BESIDE_SHARED, CHUNKS: 3})
    assert both == pytest.approx({**ends, **dict.fromkeys(outputs, 0.0)})


@pytest.mark.parametrize("ranks", [1, 2])
def test_saved_indices_are_in_the_memory_estimate(gloo_pool: GlooPool, ranks: int) -> None:
    """Together on all ranks, since the routing decides how much each saves."""
    layout = {"parallel.expert_model_parallel_size": ranks}
    values = {**MOE, **GATHER, **layout, "model.num_moe_experts": 8, "train.global_batch_size": 2}
    runs = [((), values), ((NAME,), values)]
    measured = [plugin - plain for plain, plugin in gloo_pool.run(saved_bytes, ranks, runs)]
    plain, plugin = (expected_bytes(planned(config, names, ranks)[1][0]) for names, config in runs)
    assert sum(measured) == ranks * (plugin - plain)


@pytest.mark.parametrize("config", [{}, {"model.num_moe_experts": 8}], ids=str)
def test_chunks_save_what_one_exchange_does(gloo_pool: GlooPool, config: dict[str, Any]) -> None:
    values = {**MOE, **GATHER, "parallel.expert_model_parallel_size": 2, **config}
    runs = [((NAME,), {**values, CHUNKS: chunks}) for chunks in (1, 3)]
    for whole, chunked in gloo_pool.run(saved_bytes, 2, runs):
        assert whole == chunked
