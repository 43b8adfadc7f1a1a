"""bfloat16 matmuls in float32 against float64, alone and within the operators that use them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ascend_run.ops.experts.grouped_matmul import LoopGroups, WideGroups
from ascend_run.ops.linear.linear_cross_entropy import linear_cross_entropy
from ascend_run.ops.linear.parallel_linear import (
    LinearCollectives,
    LinearImplementation,
    parallel_linear,
)
from ascend_run.ops.linear.wide_matmul import wide_matmul

HALF_UNIT = 2.0**-8
"""Maximum relative error of one rounding to bfloat16."""
T, K, N = 24, 40, 32
COUNTS = (5, 0, 19)


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def assert_rounded_once(got: Tensor, exact: Tensor, terms: int) -> None:
    """Check one rounding; where a float32 sum cancels, a few ULPs of float32 remain."""
    assert got.dtype is torch.bfloat16
    sums = terms * torch.finfo(torch.float32).eps * 32
    assert ((got.double() - exact).abs() <= HALF_UNIT * (1 + 1e-3) * exact.abs() + sums).all()


def test_a_product_is_the_exact_one_rounded_once() -> None:
    a, b = tensors((T, K), (N, K))
    exact = a.double() @ b.double().t()
    assert_rounded_once(wide_matmul(a, b.t()), exact, K)
    out = a.new_empty(T, N)
    assert wide_matmul(a, b.t(), out=out) is out
    assert_rounded_once(out, exact, K)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_other_dtypes_are_multiplied_as_they_are(dtype: torch.dtype) -> None:
    a, b = (t.to(dtype) for t in tensors((T, K), (K, N)))
    out = a.new_empty(T, N)
    assert torch.equal(wide_matmul(a, b), a @ b)
    assert torch.equal(wide_matmul(a, b, out=out), a @ b)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return parallel_linear(
        x, weight, LinearCollectives.NONE, None, LinearImplementation(matmul=wide_matmul)
    )


def test_a_linear_and_both_gradients_are_rounded_once() -> None:
    x, weight, dy = tensors((T, K), (N, K), (T, N))
    y = linear(x.requires_grad_(), weight.requires_grad_())
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    wide_x, wide_w, wide_dy = (t.detach().double() for t in (x, weight, dy))
    assert_rounded_once(y.detach(), wide_x @ wide_w.t(), K)
    assert_rounded_once(dx, wide_dy @ wide_w, N)
    assert_rounded_once(dweight, wide_dy.t() @ wide_x, T)


def test_grouped_products_are_rounded_once_too() -> None:
    x, matrices, dy = tensors((T, K), (len(COUNTS), N, K), (T, N))
    groups, exact = (kind(COUNTS, x.device) for kind in (WideGroups, LoopGroups))
    wide_x, wide_m, wide_dy = (t.double() for t in (x, matrices, dy))
    y = exact.matmul(wide_x, wide_m.transpose(1, 2))
    assert_rounded_once(groups.matmul(x, matrices.transpose(1, 2)), y, K)
    assert_rounded_once(groups.outer(dy, x), exact.outer(wide_dy, wide_x), T)
    total = torch.ones(len(COUNTS), N, K)
    groups.add_outer(total, dy, x)
    assert_rounded_once((total - 1).bfloat16(), exact.outer(wide_dy, wide_x), 64 * T)


def loss(hidden: Tensor, weight: Tensor, matmul: Callable[..., Tensor] = torch.mm) -> Tensor:
    labels, mask = torch.arange(T) % N, torch.ones(T)
    return linear_cross_entropy(hidden, weight, labels, mask, matmul=matmul)


def test_the_loss_is_as_near_to_float64_as_with_plain_products() -> None:
    leaves = [t.requires_grad_() for t in tensors((T, K), (N, K))]
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.autograd.grad(loss(*exact_leaves), exact_leaves)

    def errors(matmul: Callable[..., Tensor]) -> list[float]:
        found = torch.autograd.grad(loss(*leaves, matmul), leaves)
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    taken: list[tuple[int, ...]] = []

    def watched(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        taken.append((*input.shape, mat2.shape[1]))
        return wide_matmul(input, mat2, out=out)

    plain, wide = errors(torch.mm), errors(watched)
    assert taken == [(T, K, N), (T, N, K), (N, T, K)]
    assert all(w <= 1.05 * p for w, p in zip(wide, plain, strict=True)), (wide, plain)
