"""The model's normalisation against its formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ascend_run.testing.models import DENSE
from tests.support.small_runs import standing_model

EPS = 1e-3


def expected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight + bias


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_outputs_and_gradients_follow_the_formula(name: str, zero_centred: bool) -> None:
    values = {
        **DENSE,
        "model.normalization": name,
        "model.layernorm_zero_centered_gamma": zero_centred,
        "model.layernorm_epsilon": EPS,
    }
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 2, 32, dtype=torch.float64, generator=generator) + 0.5
    dout = torch.randn(5, 2, 32, dtype=torch.float64, generator=generator)
    with standing_model(values) as model:
        norm = model.decoder.layers[1].input_layernorm
        assert torch.equal(norm.weight, torch.full_like(norm.weight, 0.0 if zero_centred else 1.0))
        for parameter in norm.parameters():
            parameter.data.add_(torch.linspace(-0.5, 0.5, 32, dtype=torch.float64))
        inputs = (x.requires_grad_(), *norm.parameters())
        assert len(inputs) == (3 if name == "LayerNorm" else 2)
        weight = norm.weight + 1 if zero_centred else norm.weight
        wanted = expected(x, weight, norm.bias)
        got = norm(x)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        pairs = zip(
            torch.autograd.grad(got, inputs, dout),
            torch.autograd.grad(wanted, inputs, dout),
            strict=True,
        )
        for gradient, right in pairs:
            torch.testing.assert_close(gradient, right, rtol=1e-11, atol=1e-11)
