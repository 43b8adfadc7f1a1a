"""Runs with swap-attention against the run without it: bitwise equal."""

from __future__ import annotations

import pytest
import torch

from ascend_run.testing.parity import Case, Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import run_trial

from .recorded import Record, recorded_trial

EVERYTHING = {"plugins.swap-attention.min_bytes": 1}
SWAPPED = "swap-attention/swap_bytes"
LATE = "swap-attention/late_fetches"
MICRO_BATCHES = 8
CHUNKS = {
    "model.num_layers": 8,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "parallel.virtual_pipeline_model_parallel_size": 2,
    "train.global_batch_size": MICRO_BATCHES,
}


@pytest.mark.parametrize(("prefetch", "model"), [(0, "moe"), (1, "dense"), (2, "moe")])
def test_no_bit_changes_and_bytes_are_swapped(parity: Parity, prefetch: int, model: str) -> None:
    options = {**EVERYTHING, "plugins.swap-attention.prefetch": prefetch}
    (outcome,) = parity("swap-attention", model=model, options=options)
    assert outcome.metrics[SWAPPED] > 0


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize("layout", [{"tp": 2, "dp": 2}, {"pp": 2}], ids=str)
def test_no_bit_changes_on_several_ranks(parity: Parity, layout: dict[str, int]) -> None:
    """The campaign ``together`` has every layout."""
    for outcome in parity("swap-attention", layout=layout, options=EVERYTHING):
        assert outcome.metrics[SWAPPED] > 0


MODULES = {
    "norms": ["input_layernorm", "pre_mlp_layernorm"],
    "all": ["pre_mlp_layernorm", "self_attention", "input_layernorm"],
}


def test_parts_of_a_layer_leave_and_come_back_together(parity: Parity) -> None:
    """Counts as many forwards as layers, whatever part of a layer is swapped; late fetches count so
    too."""
    swapped = {}
    for name, modules in {**MODULES, "attention": ["self_attention"]}.items():
        options = {
            **EVERYTHING,
            "plugins.swap-attention.modules": modules,
            "plugins.swap-attention.prefetch": 0,
        }
        (outcome,) = parity("swap-attention", options=options)
        swapped[name] = outcome.metrics[SWAPPED]
        assert outcome.metrics[LATE] <= 2 * 4
    assert swapped["norms"] > 0
    assert swapped["all"] == swapped["norms"] + swapped["attention"]


def test_the_default_leaves_a_tiny_models_tensors_where_they_are(parity: Parity) -> None:
    (outcome,) = parity("swap-attention")
    assert outcome.metrics[SWAPPED] == 0


def test_no_bit_changes_in_a_virtual_pipeline(gloo_pool: GlooPool) -> None:
    """On two ranks with two chunks of two layers each, with dropout."""
    case = Case(plugins=(), layout={"pp": 2}, config=CHUNKS, options=EVERYTHING)
    for steps in (0, 3):
        plain = gloo_pool.run(run_trial, 2, case.trial((), steps=steps, sharded=True))
        trial = case.trial(("swap-attention",), steps=steps, sharded=True)
        swapped = gloo_pool.run(recorded_trial, 2, trial)
        for (one, records), other in zip(swapped, plain, strict=True):
            assert one.losses == other.losses
            assert one.metrics[SWAPPED] > 0
            if steps:
                assert one.metrics[LATE] == 0  # the first step recorded the order
                assert len(records) == steps
            for record in records:
                check(record)
            for shard, expected in zip(one.shards, other.shards, strict=True):
                assert shard.name == expected.name
                assert torch.equal(shard.tensor, expected.tensor), shard.name


def check(record: Record) -> None:
    """Assert that backwards have the order of Megatron's interleaved schedule, and that each fetch
    is that of the next one."""
    expected = [
        (chunk, place, group + of_group)
        for group in range(0, MICRO_BATCHES, 2)
        for chunk in (1, 0)
        for of_group in (0, 1)
        for place in (1, 0)
    ]
    done, fetched = 0, 0
    for what, forward in record:
        assert forward == expected[done], f"{what} after {done} backwards"
        done += what == "backward"
        fetched += what == "fetch"
    assert done == len(expected)
    assert fetched >= done // 2


@pytest.mark.exhaustive(by=lambda layout: {*layout} & {"tp"})
@pytest.mark.parametrize(
    ("model", "layout"), [("dense", {}), ("moe", {"tp": 2}), ("dense", {"pp": 2})], ids=str
)
def test_recomputed_feed_forwards_change_no_bit_either(
    parity: Parity, model: str, layout: dict[str, int]
) -> None:
    options = {**EVERYTHING, "plugins.swap-attention.recompute_mlp_layers": 1}
    outcomes = parity("swap-attention", model=model, layout=layout, options=options)
    kept = parity("swap-attention", model=model, layout=layout, options=EVERYTHING)
    for one, other in zip(outcomes, kept, strict=True):
        assert one.operations["silu"] > other.operations["silu"]


def test_it_goes_with_selective_recomputation(parity: Parity) -> None:
    selective = {
        "model.recompute_granularity": "selective",
        "model.recompute_modules": ["core_attn"],
    }
    (outcome,) = parity("swap-attention", config=selective, options=EVERYTHING)
    assert outcome.metrics[SWAPPED] > 0
