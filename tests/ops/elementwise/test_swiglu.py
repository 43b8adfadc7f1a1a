"""SwiGLU against its formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ascend_run.ops.elementwise.swiglu import swiglu

from . import elementwise as check


def formula(gate_up: Tensor) -> Tensor:
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width], gate_up[..., width:]
    return gate / (1 + torch.exp(-gate)) * up


def plain(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=3), st.integers(1, 9), st.integers(0, 5))
def test_any_shape_follows_the_formula(leading: list[int], width: int, seed: int) -> None:
    check.assert_equal_to_formula(swiglu, formula, [check.draw(*leading, 2 * width, seed=seed)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_lower_precision_is_no_worse_than_the_plain_composition(dtype: torch.dtype) -> None:
    leaves = [check.draw(64, 2, 256, seed=0, dtype=dtype)]
    check.assert_no_worse_than_plain(swiglu, plain, formula, leaves)


def test_strided_inputs_and_expanded_gradients_are_taken() -> None:
    strided = check.draw(8, 3, 5, seed=0).transpose(0, 2)
    check.assert_equal_to_formula(swiglu, formula, [strided])
    check.assert_takes_expanded_gradients(swiglu, [strided])


def test_the_gradient_is_one_contiguous_buffer() -> None:
    _, gradient = check.outputs_and_gradients(swiglu, [check.draw(3, 2, 8, seed=0)])
    assert gradient.is_contiguous()
