"""Runs with context parallelism against the unsharded run without it, on 2 and 4 ranks.

The tests apply to any such plugin; see ``conftest.exchange``. Every layout, with recompute and with
other plugins, is in the campaign ``together``.
"""

from __future__ import annotations

import pytest

from ascend_run.testing.parity import Parity


@pytest.mark.exhaustive(by=lambda size: [size] if size == 4 else [])
@pytest.mark.parametrize(("size", "model"), [(2, "moe"), (4, "dense")])
def test_loss_gradients_and_weights_match_one_rank(
    parity: Parity, exchange: str, size: int, model: str
) -> None:
    parity(exchange, model=model, layout={"cp": size})


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize("groups", [1, 8])
def test_it_takes_any_number_of_key_value_heads(parity: Parity, exchange: str, groups: int) -> None:
    parity(exchange, layout={"cp": 4}, config={"model.num_query_groups": groups})


def test_it_goes_with_tensor_parallelism_and_experts(parity: Parity, exchange: str) -> None:
    parity(exchange, model="moe", layout={"cp": 2, "tp": 2, "ep": 4})


def test_on_one_rank_nothing_is_sent(parity: Parity, exchange: str) -> None:
    (outcome,) = parity(exchange)
    assert not [name for name in outcome.collectives if "alltoall" in name]
