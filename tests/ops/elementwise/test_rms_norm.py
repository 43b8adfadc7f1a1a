"""RMS norm against its formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ascend_run.ops.elementwise.rms_norm import rms_norm

from . import elementwise as check

EPS = 1e-5


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


def formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=3), st.integers(3, 9), st.integers(0, 5))
def test_any_shape_follows_the_formula(leading: list[int], hidden: int, seed: int) -> None:
    """Starts at 3: below, the gradient cancels and only rounding errors remain."""
    leaves = [check.draw(*leading, hidden, seed=seed), check.draw(hidden, seed=seed + 1)]
    check.assert_equal_to_formula(ours, formula, leaves)


def test_no_rows_give_no_rows_and_a_gradient_of_zeros() -> None:
    leaves = [check.draw(0, 4, seed=0), check.draw(4, seed=1)]
    _, dx, dweight = check.outputs_and_gradients(ours, leaves)
    assert dx.shape == (0, 4)
    assert torch.equal(dweight, torch.zeros(4, dtype=torch.float64))


def test_tiny_and_huge_rows_follow_the_formula() -> None:
    scales = torch.tensor([1e-6, 1e-2, 1.0, 1e6], dtype=torch.float64)[:, None]
    x = (check.draw(4, 16, seed=0).detach() * scales).requires_grad_()
    check.assert_equal_to_formula(ours, formula, [x, check.draw(16, seed=1)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_lower_precision_is_no_worse_than_torchs_own(dtype: torch.dtype) -> None:
    leaves = [check.draw(64, 2, 256, seed=0, dtype=dtype), check.draw(256, seed=1, dtype=dtype)]
    check.assert_no_worse_than_plain(ours, plain, formula, leaves)


def test_a_float32_weight_beside_a_bf16_input_keeps_both_dtypes() -> None:
    x = check.draw(8, 32, seed=0, dtype=torch.bfloat16)
    weight = check.draw(32, seed=1, dtype=torch.float32)
    out, dx, dweight = check.outputs_and_gradients(ours, [x, weight])
    assert out.dtype == dx.dtype == torch.bfloat16
    assert dweight.dtype == torch.float32


def test_strided_inputs_are_taken() -> None:
    x = check.draw(6, 3, 8, seed=0).transpose(0, 2)
    check.assert_equal_to_formula(ours, formula, [x, check.draw(6, seed=1)])


def test_each_gradient_alone_is_the_same() -> None:
    leaves = [check.draw(3, 2, 8, seed=0), check.draw(8, seed=1)]
    check.assert_subsets_of_gradients(ours, leaves)
    check.assert_takes_expanded_gradients(ours, leaves)


def test_the_input_is_left_as_it_was() -> None:
    leaves = [check.draw(3, 8, seed=0), check.draw(8, seed=1)]
    before = [leaf.detach().clone() for leaf in leaves]
    check.outputs_and_gradients(ours, leaves)
    assert all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True))
