"""A forward that is repeated, early or by its backward, against one that saves everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from ascend_run.ops.recompute_ahead.repetition import repeat, saving_input
from ascend_run.ops.recomputed import RandomState


def random_state() -> RandomState:
    earlier = torch.get_rng_state()

    @contextmanager
    def state() -> Iterator[None]:
        own = torch.get_rng_state()
        torch.set_rng_state(earlier)
        yield
        torch.set_rng_state(own)

    return state


@pytest.mark.parametrize("early", [False, True], ids=["in backward", "early"])
def test_gradients_are_bitwise_equal_and_it_runs_once_more(early: bool) -> None:
    """Numbers that are drawn between the forward and its repetition are the same as without it."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4)).double()
    runs = []

    def forward(x: Tensor) -> Tensor:
        runs.append(torch.is_grad_enabled())
        out: Tensor = module(x)
        return out

    def gradients(saves: bool) -> list[Tensor]:
        torch.manual_seed(2)
        module.zero_grad()
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        if saves:
            out = forward(x)
        else:
            out, node = saving_input(forward, random_state(), x)
            for _ in range(2 if early else 0):
                repeat(node)
        after = torch.randn(3, 4, dtype=torch.float64)
        (out * after).sum().backward()
        assert x.grad is not None
        return [
            out.detach(),
            after,
            x.grad,
            *(p.grad for p in module.parameters() if p.grad is not None),
        ]

    expected = gradients(saves=True)
    runs.clear()
    torch.testing.assert_close(gradients(saves=False), expected, rtol=0, atol=0)
    assert runs == [False, True]


def test_only_the_input_is_saved_until_it_is_repeated() -> None:
    x = torch.randn(3, requires_grad=True)
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        out, node = saving_input(lambda y: y.exp().sin(), random_state(), x)
        assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]
        repeat(node)
        assert len(saved) == 3
    out.sum().backward()
    assert node.repeated is None
