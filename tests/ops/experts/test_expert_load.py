"""Tokens of each expert, counted for a router that is not the built-in one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ascend_run.ops.experts.expert_load import ExpertLoad


class ByPosition(nn.Module):
    """Sends token t to expert t modulo 3, of four."""

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        routing_map = torch.zeros(x_TH.shape[0], 4, dtype=torch.bool)
        routing_map[torch.arange(x_TH.shape[0]), torch.arange(x_TH.shape[0]) % 3] = True
        return routing_map * x_TH.sum(dim=1, keepdim=True), routing_map


def test_tokens_of_any_router_are_counted_until_they_are_taken() -> None:
    router = ByPosition()
    load = ExpertLoad(router)
    assert load.take() is None
    router(torch.ones(7, 2))
    router(torch.ones(2, 2))
    taken = load.take()
    assert taken is not None
    assert taken.tolist() == [4, 3, 2, 0]
    assert load.take() is None


def test_evaluation_and_forwards_without_gradients_count_nothing() -> None:
    router = ByPosition()
    load = ExpertLoad(router)
    with torch.no_grad():  # the first forward of a recomputed layer
        router(torch.ones(7, 2))
    router.eval()
    router(torch.ones(7, 2))
    assert load.take() is None
