"""Runs with ulysses against the unsharded run without it, on 2 and 4 ranks."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api.testing.parity import Parity

LAYERS, MICRO_BATCHES = 2, 4
MESSAGES = 4
"""Of one layer and micro-batch: q, k and v; out; its gradient; those of q, k and v."""


@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("size", [2, 4])
def test_it_keeps_loss_gradients_and_weights_and_sends_four_messages_a_layer(
    parity: Parity, size: int, model: str
) -> None:
    for outcome in parity("ulysses", model=model, layout={"cp": size}):
        assert outcome.collectives["alltoall_base_"] == LAYERS * MICRO_BATCHES * MESSAGES


@pytest.mark.parametrize("layout", [{"cp": 2, "dp": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_it_goes_with_data_and_tensor_parallelism(parity: Parity, layout: dict[str, int]) -> None:
    micro_batches = MICRO_BATCHES // layout.get("dp", 1)
    for outcome in parity("ulysses", layout=layout):
        assert outcome.collectives["alltoall_base_"] == LAYERS * micro_batches * MESSAGES


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_it_takes_any_number_of_key_value_heads(parity: Parity, groups: int) -> None:
    parity("ulysses", layout={"cp": 4}, config={"model.num_query_groups": groups})


def test_on_one_rank_it_changes_no_bit_and_sends_nothing(parity: Parity) -> None:
    (outcome,) = parity("ulysses")
    assert outcome.collectives.get("alltoall_base_", 0) == 0


def test_it_goes_with_experts_spread_over_the_ranks_that_share_a_sequence(
    parity: Parity,
) -> None:
    parity("ulysses", model="moe", layout={"cp": 2, "ep": 2})
