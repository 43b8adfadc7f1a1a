"""Consecutive documents are attended to independently."""

from __future__ import annotations

import pytest
import torch

from ascend_run.plugin_api import AttentionSpec, Mask
from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention
from ascend_run.testing.effects import count_operations

LENGTH = 600
ENDS = (3, 40, 41, LENGTH)
CLEARING = ("zero_", "fill_", "add_", "zeros_like", "new_zeros", "new_full")


def attend(
    mask: Mask, first: int = 0, last: int = LENGTH, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    """Return output, log-sum-exp and gradients of these positions, each with its positions
    first."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((LENGTH, 2, heads, 8) for heads in (4, 2, 2, 4))
    q, k, v, dout = (torch.randn(s, generator=generator).to(dtype)[first:last] for s in shapes)
    spec, kernel = AttentionSpec(scale=0.3, mask=mask), FusedCpuAttention()
    out, lse, _ = kernel.forward(q, k, v, spec)
    return out, lse.movedim(-1, 0), *kernel.backward(dout, q, k, v, out, lse, (), spec)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_each_document_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    together = attend(Mask(document_ends=ENDS), dtype=dtype)
    for first, last in zip((0, *ENDS), ENDS, strict=False):
        alone = attend(Mask(), first, last, dtype)
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[first:last], part)


def test_nothing_is_cleared_or_added_up_where_no_two_share_a_key() -> None:
    """The bands of a window share keys, whose gradients are accumulated."""
    with count_operations() as documents:
        attend(Mask(document_ends=ENDS))
    assert documents["copy_"]
    assert not any(documents[name] for name in CLEARING)
    with count_operations() as window:
        attend(Mask(window=(4, 0)))
    assert window["add_"] == 2 * 3
