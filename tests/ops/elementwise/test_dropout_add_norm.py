"""Dropout, residual add and norm in one node, against the formula under autograd."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from ascend_run.ops.elementwise.dropout_add_norm import (
    DropoutAddNorm,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
)

from . import elementwise as check

EPS, P = 1e-5, 0.25
MASK = torch.rand(5, 3, 8, generator=torch.Generator().manual_seed(3)) > P
OPERATORS = {"layer_norm": dropout_add_layer_norm, "rms_norm": dropout_add_rms_norm}
PARTS = ("residual", "bias", "rowscale", "layerscale", "mask")


def by_hand(
    norm: str,
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    rowscale: Tensor | None,
    layerscale: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the formula row by row and element by element."""
    outs, sums = [], []
    for i, j in product(range(x.shape[0]), range(x.shape[1])):
        row = x[i, j]
        row = row if rowscale is None else rowscale[i, j] * row
        row = row if layerscale is None else row * layerscale
        row = row if mask is None else torch.where(mask[i, j], row / (1 - P), 0.0)
        row = row if residual is None else row + residual[i, j]
        shifted = row - row.sum() / len(row) if norm == "layer_norm" else row
        normalised = shifted / torch.sqrt((shifted**2).sum() / len(row) + EPS)
        outs.append(weight * normalised + (0 if bias is None else bias))
        sums.append(row)
    return torch.stack(outs).view(x.shape), torch.stack(sums).view(x.shape)


def joined(out: Tensor, summed: Tensor) -> Tensor:
    """Concatenate both outputs, so that both get a gradient."""
    return torch.cat((out, summed.sin()), -1)


@pytest.mark.parametrize("norm", OPERATORS)
@pytest.mark.parametrize(
    "parts",
    [(), ("residual",), ("bias", "mask"), ("residual", "rowscale"), ("layerscale",), PARTS],
    ids="+".join,
)
def test_any_parts_follow_the_formula_with_both_outputs(norm: str, parts: tuple[str, ...]) -> None:
    shapes = {"residual": (5, 3, 8), "bias": (8,), "rowscale": (5, 3), "layerscale": (8,)}
    names = [name for name in shapes if name in parts]
    mask = MASK if "mask" in parts else None
    leaves = [check.draw(5, 3, 8, seed=0), check.draw(8, seed=1)]
    leaves += [check.draw(*shapes[name], seed=index) for index, name in enumerate(names, 2)]

    def ours(x: Tensor, weight: Tensor, *optional: Tensor) -> Tensor:
        given = dict(zip(names, optional, strict=True))
        result = OPERATORS[norm](
            x,
            given.get("residual"),
            weight,
            given.get("bias"),
            P if mask is not None else 0.0,
            EPS,
            rowscale=given.get("rowscale"),
            layerscale_H=given.get("layerscale"),
            mask=mask,
        )
        assert result.mask is mask
        return joined(result.out, result.summed)

    def formula(x: Tensor, weight: Tensor, *optional: Tensor) -> Tensor:
        given: dict[str, Tensor | None] = dict.fromkeys(shapes)
        given.update(zip(names, optional, strict=True))
        return joined(*by_hand(norm, x, weight, **given, mask=mask))

    check.assert_equal_to_formula(ours, formula, leaves)


def run(norm: str, x: Tensor, residual: Tensor | None = None, **more: object) -> DropoutAddNorm:
    call: Callable[..., DropoutAddNorm] = OPERATORS[norm]
    return call(x, residual, torch.ones(x.shape[-1], dtype=x.dtype), None, 0.5, EPS, **more)


def test_a_mask_is_drawn_from_the_seed_and_repeats_its_call() -> None:
    x = check.draw(64, 8, seed=0).detach()
    torch.manual_seed(5)
    first = run("layer_norm", x)
    torch.manual_seed(5)
    again = run("layer_norm", x)
    assert first.mask is not None
    assert torch.equal(first.mask, again.mask)
    assert 0.4 < first.mask.double().mean() < 0.6
    replayed = run("layer_norm", x, mask=first.mask)
    assert torch.equal(first.out, replayed.out)
    assert torch.equal(first.summed, torch.where(first.mask, 2 * x, 0.0))


@pytest.mark.parametrize("norm", OPERATORS)
def test_dtypes_are_the_inputs(norm: str) -> None:
    x = check.draw(4, 8, seed=0, dtype=torch.bfloat16)
    residual = check.draw(4, 8, seed=1, dtype=torch.float32)
    result = run(norm, x, residual)
    assert (result.out.dtype, result.summed.dtype) == (torch.bfloat16, torch.float32)
    dx, dresidual = torch.autograd.grad(result.out.float().sum(), [x, residual])
    assert (dx.dtype, dresidual.dtype) == (torch.bfloat16, torch.float32)
    assert run(norm, x).summed.dtype is torch.bfloat16
    assert run(norm, x, residual_in_fp32=True).summed.dtype is torch.float32


def test_a_share_that_leaves_nothing_is_refused() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"dropout p=1\.0; expected 0 <= p < 1"):
        dropout_add_layer_norm(x, None, torch.ones(4), None, 1.0, EPS)
