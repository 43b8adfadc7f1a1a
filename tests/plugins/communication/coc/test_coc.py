"""Sliced linears against the run without the plugin: forward, gradients, calls and bytes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ascend_run.plugin_api import AscendRunError, Claim
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.communication.coc import Coc
from ascend_run.testing.models import DENSE
from ascend_run.testing.parity import Case, Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.needed_plugins import case
from tests.support.tiny_options import planned_with

LAYERS, MICRO_BATCHES = 2, 4
PASSES = LAYERS * MICRO_BATCHES
GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


RECOMPUTED = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}
FROZEN = {"plugins.lora.export": False, "plugins.coc.recompute_all_gather": False}


def counts(outcome: RankOutcome, without: RankOutcome) -> tuple[Mapping[str, int], int]:
    """Return (additional calls of each collective, additional bytes in total)."""
    names = {*outcome.collectives, *without.collectives}
    more = {
        name: outcome.collectives.get(name, 0) - without.collectives.get(name, 0) for name in names
    }
    nbytes = sum(outcome.sent_bytes.values()) - sum(without.sent_bytes.values())
    return {name: number for name, number in more.items() if number}, nbytes


@pytest.mark.exhaustive(by=lambda number: [number] if number == 2 else [])
@pytest.mark.parametrize("number", [1, 2, 8])
def test_it_slices_collectives_and_keeps_their_numbers_and_bytes(
    parity: Parity, number: int
) -> None:
    options = {"plugins.coc.parallel_num": number}
    outcomes = parity("coc", layout={"tp": 2}, options=options)
    without = parity.outcomes(Case(plugins=(), layout={"tp": 2}))
    # Forward all-gather and reduce-scatter in attention and MLP each, backward two all-gathers.
    more = 2 * PASSES * (number - 1)
    expected = {GATHER: 2 * more, SCATTER: more} if number > 1 else {}
    for outcome, plain in zip(outcomes, without, strict=True):
        assert counts(outcome, plain) == (expected, 0)


def test_saved_gathered_inputs_are_not_gathered_again(parity: Parity) -> None:
    options = {"plugins.coc.parallel_num": 1, "plugins.coc.recompute_all_gather": False}
    outcomes = parity("coc", layout={"tp": 2}, options=options)
    without = parity.outcomes(Case(plugins=(), layout={"tp": 2}))
    for outcome, plain in zip(outcomes, without, strict=True):
        assert counts(outcome, plain)[0] == {GATHER: -2 * PASSES}


def test_without_sequence_parallelism_the_sum_of_each_slice_is_under_way(
    gloo_pool: GlooPool,
) -> None:
    layout = {"parallel.tensor_model_parallel_size": 2}

    def trial(*plugins: str) -> RankOutcome:
        config = {**DENSE, **layout, "plugins.coc.parallel_num": 4} if plugins else DENSE | layout
        return gloo_pool.run(run_trial, 2, Trial(plugins=plugins, config=config))[0]

    ours, plain = trial("coc"), trial()
    assert ours.losses == pytest.approx(plain.losses, rel=1e-12)
    assert counts(ours, plain) == ({REDUCE: 2 * PASSES * 3}, 0)


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
    parity("coc", beside=beside, model=model, layout=layout)


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize(
    "config",
    [
        {"model.add_bias_linear": True, "model.normalization": "LayerNorm"},
        RECOMPUTED,
    ],
    ids=lambda config: "+".join(key.partition(".")[2] for key in config),
)
def test_other_models_are_kept_too(parity: Parity, config: dict[str, object]) -> None:
    parity("coc", layout={"tp": 2}, config=config)


def test_four_ranks_are_kept_too(parity: Parity) -> None:
    parity("coc", layout={"tp": 4}, config={"model.num_query_groups": 4})


def test_it_claims_linear_collectives_and_is_idle_without_any() -> None:
    assert claims_of(Coc) == (Claim.LINEAR_COMM,)
    assert {*planned_with("coc").plan.idle} == {"coc"}
    split = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
    assert planned_with("coc", *split, ranks=2).plan.idle == {}
    with pytest.raises(AscendRunError, match="parallel_num"):
        planned_with("coc", "plugins.coc.parallel_num=3")


def test_saved_gathered_inputs_are_in_the_memory_estimate() -> None:
    sizes = {"data.seq_length": 256, "train.micro_batch_size": 4, "model.vocab_size": 4096}
    tp = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
    config = {**DENSE, **sizes, **tp}
    keeps = {"plugins.coc.recompute_all_gather": False}
    _, (plain,) = planned(config, ("coc",), 2)
    _, (cost,) = planned({**config, **keeps}, ("coc",), 2)
    part = 256 * 4 * 32 * 4 // 2  # tokens, H, float32, of one rank
    assert cost.memory.peak - plain.memory.peak == 2 * LAYERS * part


@pytest.mark.exhaustive(by=lambda beside: [bool(beside)])
@pytest.mark.parametrize(
    ("beside", "values"),
    [
        ((), {"parallel.sequence_parallel": True, **RECOMPUTED}),
        ((), {"plugins.coc.parallel_num": 4}),
        case(("lora",), {"parallel.sequence_parallel": True, **FROZEN}),
    ],
    ids=["sequence-recomputed", "tensors", "frozen-kept-gathered"],
)
def test_collectives_match_the_cost_model(
    gloo_pool: GlooPool, beside: tuple[str, ...], values: dict[str, object]
) -> None:
    config = {**DENSE, "data.seq_length": 64, "parallel.tensor_model_parallel_size": 2, **values}
    assert differences(gloo_pool, config, (*beside, "coc")) == []
