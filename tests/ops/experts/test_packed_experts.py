"""Experts by packed weights against the loop over plain ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ascend_run.ops.experts.loop_experts import loop_experts
from ascend_run.ops.experts.packed_experts import PackedExperts
from ascend_run.ops.linear.packed_linear import unavailable
from ascend_run.types.moe import ExpertActivation, ExpertWeights

H, FFN, X = 24, 40, 4
SILU = ExpertActivation(function=F.silu)
PACKS = unavailable(torch.float32) is None
"""On this machine."""


def made(dtype: torch.dtype, biases: bool) -> ExpertWeights:
    torch.manual_seed(0)
    shapes = [(X, 2 * FFN, H), (X, H, FFN), (X, 2 * FFN), (X, H)]
    return ExpertWeights(*(torch.randn(shape).to(dtype) for shape in shapes[: 4 if biases else 2]))


def packed(weights: ExpertWeights) -> tuple[PackedExperts, ExpertWeights]:
    """Return the kernel and the weights that it has packed, copies of these."""
    kernel = PackedExperts()
    own = weights._replace(fc1=weights.fc1.clone(), fc2=weights.fc2.clone())
    kernel.pack(own.fc1)
    kernel.pack(own.fc2)
    return kernel, own


def tokens(counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(sum(counts), H), torch.rand(sum(counts))


@pytest.mark.parametrize("counts", [(2, 0, 17, 1), (0, 0, 0, 0), (0, 0, 0, 1)], ids=str)
@pytest.mark.parametrize("biases", [False, True])
def test_packed_experts_compute_as_the_loop(biases: bool, counts: tuple[int, ...]) -> None:
    weights, (x, probs) = made(torch.float32, biases), tokens(counts)
    kernel, own = packed(weights)
    assert len(kernel.packed) == (2 if PACKS else 0)
    got = kernel(x, counts, probs, own, SILU)
    want = loop_experts(x, counts, probs, weights, SILU)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_a_row_is_the_same_alone_and_among_others() -> None:
    counts = (5, 0, 30, 1)
    x, probs = tokens(counts)
    kernel, own = packed(made(torch.float32, True))
    together = kernel(x, counts, probs, own, SILU)
    for row, expert in ((0, 0), (4, 0), (20, 2), (35, 3)):
        one = [int(place == expert) for place in range(X)]
        alone = kernel(x[row : row + 1], one, probs[row : row + 1], own, SILU)
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=0 if PACKS else 1e-4)


def test_the_plain_weights_have_no_memory_left() -> None:
    _, own = packed(made(torch.float32, False))
    for stack in (own.fc1, own.fc2):
        assert bool(stack.isnan().all()) == PACKS
        assert stack.untyped_storage().nbytes() == (4 if PACKS else 4 * stack.numel())


def test_float64_and_weights_of_others_are_computed_by_the_loop() -> None:
    weights, (x, probs) = made(torch.float64, True), tokens((2, 1, 0, 1))
    kernel, own = packed(weights)
    assert not kernel.packed
    for one in (kernel, packed(made(torch.float32, True))[0]):
        got = one(x.double(), (2, 1, 0, 1), probs, own, SILU)
        assert torch.equal(got, loop_experts(x.double(), (2, 1, 0, 1), probs, weights, SILU))
