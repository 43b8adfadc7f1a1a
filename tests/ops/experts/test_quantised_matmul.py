"""Quantised grouped GEMMs against integer arithmetic row by row."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from ascend_run.ops.experts.quantised_matmul import (
    quant_grouped_matmul,
    weight_quant_grouped_matmul,
)
from tests.ops.elementwise import elementwise as check

SIZES = (3, 0, 4)
OWNER = [group for group, size in enumerate(SIZES) for _ in range(size)]


def integers(*shape: int, seed: int, low: int = -128, high: int = 127) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator)


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x and matrices as int8, then their exact product, bias and scales."""
    x, matrices = integers(7, 64, seed=0), integers(3, 64, 5, seed=1)
    exact = torch.stack([x[row] @ matrices[group] for row, group in enumerate(OWNER)])
    scale = check.draw(3, 5, seed=2).detach().abs() / 1e3
    return x.to(torch.int8), matrices.to(torch.int8), exact, integers(3, 5, seed=3), scale


FORMULAS = {
    None: lambda y: y,
    "relu": lambda y: y * (y > 0),
    "gelu_tanh": lambda y: 0.5 * y * (1 + ((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)).tanh()),
    "fastgelu": lambda y: y / (1 + (-1.702 * y).exp()),
    "silu": lambda y: y / (1 + (-y).exp()),
}


@pytest.mark.parametrize("activation", FORMULAS, ids=str)
@pytest.mark.parametrize("cumulative", [True, False], ids=["totals", "counts"])
def test_int8_products_are_exact_before_their_scale(
    activation: str | None, cumulative: bool
) -> None:
    x, matrices, exact, bias, scale = operands()
    per_token = check.draw(7, seed=4).detach().abs()
    groups = list(accumulate(SIZES)) if cumulative else list(SIZES)
    got = quant_grouped_matmul(
        x,
        matrices,
        scale,
        groups,
        cumulative=cumulative,
        per_token_scale_T=per_token,
        bias_XN=bias.int(),
        activation=activation,
        output_dtype=torch.float64,
    )
    want = FORMULAS[activation]((exact + bias[OWNER]) * scale[OWNER] * per_token[:, None])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_output_is_rounded_once_to_its_dtype() -> None:
    x, matrices, exact, _, scale = operands()
    transposed = matrices.mT.contiguous().mT
    got = quant_grouped_matmul(x, transposed, scale, [3, 3, 7], cumulative=True)
    assert torch.equal(got, (exact * scale[OWNER]).half())


def test_an_int8_output_rounds_to_even_and_saturates() -> None:
    x = torch.tensor([[1], [3], [5], [127], [-128]], dtype=torch.int8)
    one, half = torch.ones(1, 1, 1, dtype=torch.int8), torch.full((1, 1), 0.5)
    options = {"cumulative": True, "output_dtype": torch.int8}
    got = quant_grouped_matmul(x, one, half, [5], **options)
    assert got.flatten().tolist() == [0, 2, 2, 64, -64]
    got = quant_grouped_matmul(x, one, 3 * half, [5], **options)
    assert got.flatten().tolist() == [2, 4, 8, 127, -128]
    with pytest.raises(ValueError, match="no per-token scale and no activation; use a floating"):
        quant_grouped_matmul(x, one, half, [5], **options, activation="relu")


@pytest.mark.parametrize("with_offset", [True, False])
def test_int8_matrices_stand_for_their_scaled_values(with_offset: bool) -> None:
    matrices = integers(3, 6, 5, seed=1)
    x = check.draw(7, 6, seed=0).detach()
    scale, offset, bias = (check.draw(3, 5, seed=seed).detach() for seed in (2, 3, 4))
    got = weight_quant_grouped_matmul(
        x,
        matrices.to(torch.int8),
        scale,
        offset if with_offset else None,
        list(SIZES),
        cumulative=False,
        bias_XN=bias,
    )
    want = torch.zeros(7, 5, dtype=torch.float64)
    for t, n, k in torch.cartesian_prod(*map(torch.arange, (7, 5, 6))).tolist():
        group = OWNER[t]
        value = matrices[group, k, n] + (offset[group, n] if with_offset else 0)
        want[t, n] += x[t, k] * value * scale[group, n]
    want += bias[OWNER]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-10)


def test_gradients_are_refused() -> None:
    x, matrices, _, _, scale = operands()
    with pytest.raises(RuntimeError, match="quant_grouped_matmul has no backward"):
        quant_grouped_matmul(x, matrices, scale.requires_grad_(), [3, 3, 7], cumulative=True)
    with pytest.raises(RuntimeError, match="weight_quant_grouped_matmul has no backward"):
        weight_quant_grouped_matmul(
            check.draw(7, 64, seed=0), matrices, scale.detach(), None, [3, 3, 7], cumulative=True
        )
