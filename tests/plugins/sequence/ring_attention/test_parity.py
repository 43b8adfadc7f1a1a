"""Runs with the ring against the unsharded run without it, on 2 and 4 ranks.

Every layout, with recompute and with other plugins, is in the campaign ``together``.
"""

from __future__ import annotations

import pytest

from ascend_run.testing.parity import Parity

LAYERS, MICRO_BATCHES = 2, 4
RING = "ring-attention"
SWAP_ALL = {"plugins.swap-attention.min_bytes": 1}


@pytest.mark.exhaustive(by=lambda size: [size] if size == 4 else [])
@pytest.mark.parametrize(("size", "model"), [(2, "moe"), (4, "dense")])
def test_loss_gradients_and_weights_match_one_rank(parity: Parity, size: int, model: str) -> None:
    """A layer sends each micro-batch's keys and values once, and in backward with their
    gradients."""
    for outcome in parity(RING, model=model, layout={"cp": size}):
        messages = LAYERS * MICRO_BATCHES * 3 * (size - 1)
        assert outcome.collectives.get("send", 0) == messages
        # float64: 16 tokens a rank, two groups of keys and of values, each 4 wide
        assert outcome.sent_bytes.get("send", 0) == messages * 16 // size * 2 * 2 * 4 * 8


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize("groups", [1, 8])
def test_it_takes_any_number_of_key_value_heads(parity: Parity, groups: int) -> None:
    parity(RING, layout={"cp": 2}, config={"model.num_query_groups": groups})


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize(
    "options",
    [
        {"cut": "contiguous"},
        {"kv_cache": "half"},
        {"kv_cache": "full", "kv_cache_every": 2},
    ],
    ids=str,
)
def test_its_options_change_no_number(parity: Parity, options: dict[str, str]) -> None:
    named = {f"plugins.{RING}.{name}": value for name, value in options.items()}
    outcomes = parity(RING, layout={"cp": 4}, options=named)
    # A ring that saves every received part has one pass less in backward.
    passes = 2 + 3 if "kv_cache_every" in options else 3 * LAYERS  # one of the two layers keeps
    expected = MICRO_BATCHES * 3 * passes
    assert [outcome.collectives["send"] for outcome in outcomes] == [expected] * 4


def test_it_takes_a_window_and_stretches_by_the_full_length(parity: Parity) -> None:
    """A rank's 8 positions alone would select the short factors."""
    config = {
        "model.window_size": [9, 0],
        "model.rope_scaling_type": "longrope",
        "model.rope_scaling_short_factor": [1.0, 1.5],
        "model.rope_scaling_long_factor": [2.0, 5.0],
        "model.rope_scaling_original_max_position_embeddings": 8,
        "model.max_position_embeddings": 64,
    }
    parity(RING, layout={"cp": 2}, config=config)


@pytest.mark.needs_plugins("swap-attention", "gmm")
def test_what_it_keeps_for_backward_may_wait_on_the_host(parity: Parity) -> None:
    for outcome in parity(
        (RING, "swap-attention", "gmm"), model="moe", layout={"cp": 2}, options=SWAP_ALL
    ):
        assert outcome.metrics["swap-attention/swap_bytes"] > 0


def test_the_ring_may_be_recomputed(parity: Parity) -> None:
    config = {
        "model.recompute_granularity": "full",
        "model.recompute_method": "uniform",
        "model.recompute_num_layers": 1,
    }
    for outcome in parity(RING, layout={"cp": 2}, config=config):
        assert outcome.collectives["send"] > LAYERS * MICRO_BATCHES * 3
