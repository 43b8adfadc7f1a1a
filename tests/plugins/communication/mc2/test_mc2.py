"""Linears with overlapped collectives against the run without, with every gradient."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api import AscendRunError, Claim
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.communication.mc2 import Mc2
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.parity import Case, Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.needed_plugins import case
from tests.support.tiny_options import planned_with

LAYERS, MICRO_BATCHES = 2, 4
PASSES = LAYERS * MICRO_BATCHES
GATHER, SCATTER = "_allgather_base_", "_reduce_scatter_base_"
KEPT = {"plugins.lora.export": False, "plugins.mc2.keep_gathered": True}


def more(outcome: RankOutcome, without: RankOutcome, name: str) -> int:
    return outcome.collectives.get(name, 0) - without.collectives.get(name, 0)


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize(("ranks", "hops"), [(2, 1), (4, 3)])
def test_blocks_go_round_a_ring_in_the_place_of_collectives(
    parity: Parity, ranks: int, hops: int
) -> None:
    """Replaces each all-gather and reduce-scatter of forward, and the all-gather in backward of a
    row-parallel linear; a collective that overlaps with the gradient of a weight stays."""
    outcomes = parity("mc2", layout={"tp": ranks}, config={"model.num_query_groups": 4})
    case = Case(plugins=(), layout={"tp": ranks}, config={"model.num_query_groups": 4})
    for outcome, plain in zip(outcomes, parity.outcomes(case), strict=True):
        assert more(outcome, plain, GATHER) == -4 * PASSES
        assert more(outcome, plain, SCATTER) == -2 * PASSES
        assert more(outcome, plain, "send") == more(outcome, plain, "recv_") == 6 * PASSES * hops


def test_saved_gathered_inputs_are_not_gathered_again(parity: Parity) -> None:
    options = {"plugins.mc2.keep_gathered": True}
    outcomes = parity("mc2", layout={"tp": 2}, options=options)
    without = parity.outcomes(Case(plugins=("mc2",), layout={"tp": 2}))
    for outcome, again in zip(outcomes, without, strict=True):
        assert more(outcome, again, GATHER) == -2 * PASSES


def test_without_sequence_parallelism_sums_go_round(gloo_pool: GlooPool) -> None:
    config = {**DENSE, "parallel.tensor_model_parallel_size": 2}
    ours, plain = (
        gloo_pool.run(run_trial, 2, Trial(plugins=plugins, config=config))[0]
        for plugins in (("mc2",), ())
    )
    assert ours.losses == pytest.approx(plain.losses, rel=1e-12)
    assert more(ours, plain, "allreduce_") == -2 * PASSES
    assert more(ours, plain, "send") == more(ours, plain, GATHER) == 2 * PASSES


@pytest.mark.exhaustive(by=lambda model: [model] if model == "moe" else [])
@pytest.mark.parametrize(
    ("beside", "model", "layout"),
    [
        ((), "dense", {"tp": 2, "pp": 2}),
        case(("gmm",), "moe", {"tp": 2, "expt_tp": 2}),
    ],
    ids=str,
)
def test_it_goes_with_other_plugins_and_layouts(
    parity: Parity, beside: tuple[str, ...], model: str, layout: dict[str, int]
) -> None:
    """The campaign ``together`` has every layout and every pair."""
    parity("mc2", beside=beside, model=model, layout=layout)


def test_biases_are_added_after(parity: Parity) -> None:
    config = {"model.add_bias_linear": True, "model.normalization": "LayerNorm"}
    parity("mc2", layout={"tp": 2}, config=config)


def test_it_claims_linear_collectives_and_is_idle_without_any() -> None:
    assert claims_of(Mc2) == (Claim.LINEAR_COMM,)
    assert {*planned_with("mc2").plan.idle} == {"mc2"}


@pytest.mark.needs_plugins("coc")
def test_beside_coc_it_is_refused_by_the_claim() -> None:
    with pytest.raises(AscendRunError, match=r"both claim 'linear-comm'"):
        planned_with("mc2,coc")


SHARED = {"model.moe_shared_expert_intermediate_size": 48, "model.num_moe_experts": 16}


@pytest.mark.exhaustive(by=lambda beside: [bool(beside)])
@pytest.mark.parametrize(
    ("beside", "ranks", "values"),
    [
        ((), 2, {**MOE, **SHARED, "parallel.sequence_parallel": True}),
        ((), 4, {**DENSE, "model.num_query_groups": 4}),
        case(("lora",), 2, {**DENSE, "parallel.sequence_parallel": True, **KEPT}),
    ],
    ids=["sequence-shared-experts", "tensors-over-four", "frozen-kept-gathered"],
)
def test_collectives_match_the_cost_model(
    gloo_pool: GlooPool, beside: tuple[str, ...], ranks: int, values: dict[str, object]
) -> None:
    config = {**values, "data.seq_length": 64, "parallel.tensor_model_parallel_size": ranks}
    assert differences(gloo_pool, config, (*beside, "mc2")) == []


def test_on_the_npu_the_operators_send_what_the_collectives_would() -> None:
    split = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
    config = {**DENSE, **split, "platform": "npu"}
    (_, (plain,)), (_, (cost,)) = (planned(config, plugins, 2) for plugins in ((), ("mc2",)))
    counted = [
        {(m.operation, m.group, m.why): (m.calls, m.sent_bytes) for m in expected.communication}
        for expected in (plain, cost)
    ]
    assert counted[0] == counted[1]
    hidden = {m.why for m in cost.communication if m.overlapped}
    assert hidden >= {"attention, forward", "attention, backward", "feed-forward, forward"}
    assert not [m for m in plain.communication if m.overlapped]
