"""The NPU's operator table on reference operators, against the formula under autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.ops.experts.expert_mlp import expert_mlp
from ascend_run.plugins.platforms.npu.platform_ops import NpuGroups, platform_ops

OPS = platform_ops()


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def assert_same(
    ours: Callable[..., Tensor], formula: Callable[..., Tensor], *leaves: Tensor
) -> None:
    """Compare the output and every gradient, with a non-contiguous upstream gradient."""
    got, want = ours(*leaves), formula(*leaves)
    assert got.dtype == leaves[0].dtype
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    upstream = draw(*reversed(got.shape)).detach().permute(*reversed(range(got.dim())))
    for ours_d, formula_d in zip(
        torch.autograd.grad(got, leaves, upstream),
        torch.autograd.grad(want, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours_d, formula_d, rtol=0, atol=1e-12)


def test_rms_norm_follows_the_formula() -> None:
    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    assert_same(lambda x, w: OPS.rms_norm(x, w, 1e-5), formula, draw(5, 2, 8), draw(8))


def test_the_gradient_of_a_half_precision_weight_is_in_its_dtype() -> None:
    x, weight = draw(5, 2, 8, dtype=torch.bfloat16), draw(8, dtype=torch.bfloat16)
    OPS.rms_norm(x, weight, 1e-5).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16


def test_layer_norm_follows_the_formula() -> None:
    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    leaves = draw(5, 2, 8), draw(8), draw(8)
    assert_same(lambda x, w, b: OPS.layer_norm(x, w, b, 1e-5), formula, *leaves)


def test_swiglu_follows_the_formula() -> None:
    def formula(x: Tensor) -> Tensor:
        return F.silu(x[..., :6]) * x[..., 6:]

    assert_same(OPS.swiglu, formula, draw(5, 2, 12))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 4])
def test_rotary_follows_the_formula(interleaved: bool, width: int) -> None:
    angles = draw(5, width // 2).detach()

    def formula(x: Tensor) -> Tensor:
        pairs = x[..., :width].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        axis = -1 if interleaved else -2
        first, second = pairs.unbind(axis)
        cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), axis)
        return torch.cat((turned.flatten(-2), x[..., width:]), -1)

    whole = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    assert_same(
        lambda x: OPS.rotary(x, whole.cos(), whole.sin(), interleaved), formula, draw(5, 2, 3, 8)
    )


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("counts", [(3, 0, 1, 2), (0, 0, 5, 0), (0, 0, 0, 0)], ids=str)
def test_experts_by_grouped_products_follow_the_formula(
    counts: tuple[int, ...], on_device: bool
) -> None:
    """Forward and backward, for any experts without tokens."""
    given = torch.tensor(counts) if on_device else counts
    experts = [number for number, count in enumerate(counts) for _ in range(count)]

    def formula(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
        hidden = torch.einsum("th,tfh->tf", x, fc1[experts])
        gated = F.silu(hidden[:, :6]) * hidden[:, 6:] * probs[:, None]
        return torch.einsum("tf,thf->th", gated, fc2[experts])

    assert_same(
        lambda x, probs, fc1, fc2: expert_mlp(
            x, given, probs, fc1, fc2, backend=OPS.grouped_matmul
        ),
        formula,
        *(draw(sum(counts), 8), draw(sum(counts)), draw(4, 12, 8), draw(4, 8, 6)),
    )


def test_no_rows_add_nothing() -> None:
    total = torch.ones(2, 3, 2)
    NpuGroups((0, 0), total.device).add_outer(total, torch.empty(0, 3), torch.empty(0, 2))
    assert torch.equal(total, torch.ones(2, 3, 2))


def test_grouped_products_are_added_to_a_wider_sum() -> None:
    a, b = draw(5, 3, dtype=torch.bfloat16).detach(), draw(5, 2, dtype=torch.bfloat16).detach()
    total = torch.ones(2, 3, 2)
    NpuGroups((5, 0), a.device).add_outer(total, a, b)
    torch.testing.assert_close(total[0], 1 + a.float().t() @ b.float(), rtol=0, atol=1e-6)
    assert not torch.equal(total[0], 1 + (a.t() @ b).float())  # no intermediate rounding
    assert torch.equal(total[1], torch.ones(3, 2))
