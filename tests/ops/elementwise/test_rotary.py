"""Rotary embedding, alone and fused with the split of q, k and v, against its formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascend_run.ops.elementwise.rotary import rotary, split_qkv_rotary

from . import elementwise as check


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate each pair in its own plane; tables [S, R] need not repeat."""
    width = cos.shape[1]
    columns = list(x.unbind(-1))
    out = list(columns)
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        out[a] = columns[a] * cos[:, a, None, None] - columns[b] * sin[:, a, None, None]
        out[b] = columns[b] * cos[:, b, None, None] + columns[a] * sin[:, b, None, None]
    return torch.stack(out, dim=-1)


def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute RoPE as in model code: tables in the input's dtype, halves concatenated."""
    cos, sin = (table.to(x.dtype)[:, None, None] for table in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def tables(sequence: int, width: int) -> tuple[Tensor, Tensor]:
    cos, sin = (check.draw(sequence, width, seed=seed).detach() for seed in (7, 8))
    return cos, sin


@pytest.mark.parametrize("interleaved", [False, True])
@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, 4),) * 3),
    half=st.integers(1, 4),
    rest=st.integers(0, 3),
)
def test_any_shape_and_partial_width_follows_the_formula(
    interleaved: bool, shape: tuple[int, int, int], half: int, rest: int
) -> None:
    cos, sin = tables(shape[0], 2 * half)
    check.assert_equal_to_formula(
        lambda x: rotary(x, cos, sin, interleaved),
        lambda x: rotated(x, cos, sin, interleaved),
        [check.draw(*shape, 2 * half + rest, seed=0)],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_lower_precision_is_no_worse_than_the_plain_composition(dtype: torch.dtype) -> None:
    angles = torch.outer(torch.arange(64.0), 100 ** -torch.linspace(0, 1, 16))
    cos, sin = (function(angles).repeat(1, 2).to(dtype) for function in (torch.cos, torch.sin))
    check.assert_no_worse_than_plain(
        lambda x: rotary(x, cos, sin, False),
        lambda x: plain(x, cos, sin),
        lambda x: rotated(x, cos.double(), sin.double(), False),
        [check.draw(64, 2, 4, 32, seed=0, dtype=dtype)],
    )


def test_strided_inputs_and_expanded_gradients_are_taken() -> None:
    cos, sin = tables(3, 8)
    strided = check.draw(8, 4, 2, 3, seed=0).permute(3, 2, 1, 0)
    check.assert_equal_to_formula(
        lambda x: rotary(x, cos, sin, False), lambda x: rotated(x, cos, sin, False), [strided]
    )
    check.assert_takes_expanded_gradients(lambda x: rotary(x, cos, sin, False), [strided])


def split_by_formula(
    mixed: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int, int], interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Split head by head: a group's queries, then its key, then its value."""
    groups, queries, width = sizes
    heads = list(mixed.split(width, dim=2))
    q, k, v = [], [], []
    for _ in range(groups):
        q += [heads.pop(0) for _ in range(queries)]
        k.append(heads.pop(0))
        v.append(heads.pop(0))
    turned = (rotated(torch.stack(part, 2), cos, sin, interleaved) for part in (q, k))
    return (*turned, torch.stack(v, 2))


def one(split: Callable[..., tuple[Tensor, ...]]) -> Callable[[Tensor], Tensor]:
    """Concatenate the three outputs, for a comparison that takes one."""
    return lambda mixed: torch.cat([part.flatten(2) for part in split(mixed)], dim=2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [4, 6], ids=["partial", "whole"])
@pytest.mark.parametrize("queries", [1, 3])
def test_the_split_follows_the_formula(queries: int, width: int, interleaved: bool) -> None:
    sizes = (2, queries, 6)
    cos, sin = tables(5, width)
    mixed = check.draw(5, 3, 2 * (queries + 2) * 6, seed=0)
    check.assert_equal_to_formula(
        one(lambda m: split_qkv_rotary(m, cos, sin, sizes, interleaved)),
        one(lambda m: split_by_formula(m, cos, sin, sizes, interleaved)),
        [mixed],
    )


def test_the_split_packs_heads_and_keeps_no_view_of_its_input() -> None:
    cos, sin = tables(5, 4)
    mixed = check.draw(5, 3, 2 * 4 * 4, seed=0)
    outputs = split_qkv_rotary(mixed, cos, sin, (2, 2, 4), False)
    assert [tuple(out.shape) for out in outputs] == [(5, 3, 4, 4), (5, 3, 2, 4), (5, 3, 2, 4)]
    for out in outputs:
        assert out.permute(1, 2, 0, 3).is_contiguous()
        assert out.untyped_storage().data_ptr() != mixed.untyped_storage().data_ptr()


def test_an_output_of_the_split_that_nothing_reads_gets_no_gradient() -> None:
    cos, sin = tables(5, 4)
    mixed = check.draw(5, 3, 2 * 3 * 4, seed=0)
    sizes = (2, 1, 4)
    q, _, _ = split_qkv_rotary(mixed, cos, sin, sizes, False)
    (ours,) = torch.autograd.grad(q.square().sum(), mixed)
    q, _, _ = split_by_formula(mixed, cos, sin, sizes, False)
    (theirs,) = torch.autograd.grad(q.square().sum(), mixed)
    assert (ours - theirs).abs().max() <= 1e-12
