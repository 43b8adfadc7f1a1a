"""The linear of a router: its arithmetic is that of cast operands, and it saves narrow ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.ops.experts.gating import wide_linear

# S sequence, B batch, H hidden size, X experts


def operands(dtype: torch.dtype, *, biased: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 2, 24), (6, 24), (6,)]
    made = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return [*made[:2], made[2] if biased else None]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float64),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_no_bit_differs_from_cast_operands(
    dtype: torch.dtype, wide: torch.dtype, biased: bool
) -> None:
    x, weight, bias = operands(dtype, biased=biased)
    assert x is not None
    assert weight is not None
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    dy = torch.randn(5, 2, 6, dtype=wide, generator=torch.Generator().manual_seed(4))
    cast = None if bias is None else bias.to(wide)
    plain = F.linear(x.to(wide), weight.to(wide), cast)
    out = wide_linear(x, weight, bias, wide)
    assert torch.equal(out, plain)
    pairs = zip(
        torch.autograd.grad(out, leaves, dy), torch.autograd.grad(plain, leaves, dy), strict=True
    )
    for found, expected in pairs:
        assert found.dtype is dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("trained", [False, True])
def test_only_narrow_operands_are_saved(trained: bool) -> None:
    x, weight, _ = operands(torch.bfloat16, biased=False)
    assert x is not None
    assert weight is not None
    weight.requires_grad_(trained)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        wide_linear(x, weight, None, torch.float32)
    expected = [x, weight] if trained else [weight]
    assert saved == [tensor.untyped_storage().data_ptr() for tensor in expected]
