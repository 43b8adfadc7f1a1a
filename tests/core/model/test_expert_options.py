"""Biases and activations of experts and of dense MLPs, against plain formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascend_run.testing.models import DENSE, MOE
from tests.support.needed_plugins import case
from tests.support.small_runs import standing_model

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "quick_gelu": lambda x: x / (1 + (-1.3 * x).exp()),
}
CHANGES: dict[str, dict[str, Any]] = {
    "clamped silu": {"activation": "silu", "activation_func_clamp_value": 0.05},
    "offset": {"activation": "silu", "glu_linear_offset": -0.5},
    "clamped quick_gelu with offset": {
        "activation": "quick_gelu",
        "quick_gelu_alpha": 1.3,
        "activation_func_clamp_value": 0.05,
        "glu_linear_offset": 1.0,
    },
}
BIASES = {"add_router_bias": True, "add_expert_bias": True}


def activated(hidden: Tensor, options: dict[str, Any]) -> Tensor:
    gate, up = hidden.chunk(2, -1)
    if (bound := options.get("activation_func_clamp_value")) is not None:
        gate, up = torch.where(gate > bound, bound, gate), torch.clip(up, -bound, bound)
    offset = options.get("glu_linear_offset", 0.0)
    return FUNCTIONS[options.get("activation", "silu")](gate) * (up + offset)


def named(options: dict[str, Any]) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in options.items()}


def hidden_states() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn((16, 2, 32), dtype=torch.float64, generator=generator)
    return x.requires_grad_()


def randomize_biases(module: nn.Module) -> None:
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if name.endswith("bias"):
            assert not parameter.any(), "biases are 0 at first"
            parameter.data.normal_(generator=torch.Generator().manual_seed(number))


def check_gradients(got: Tensor, wanted: Tensor, inputs: Sequence[Tensor]) -> None:
    torch.testing.assert_close(got, wanted, **CLOSE)
    dout = torch.randn_like(got)
    ours, plain = (torch.autograd.grad(y, inputs, dout) for y in (got, wanted))
    for gradient, right in zip(ours, plain, strict=True):
        assert right.any()
        torch.testing.assert_close(gradient, right, **CLOSE)


@pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES)
def test_a_dense_mlp_has_the_activation_of_its_options(options: dict[str, Any]) -> None:
    with standing_model({**DENSE, **named({**options, "add_mlp_bias": True})}) as model:
        mlp = model.decoder.layers[0].mlp
        randomize_biases(mlp)
        x, (fc1, fc2) = hidden_states(), (mlp.linear_fc1, mlp.linear_fc2)
        got, bias = mlp(x)
        wanted = activated(x @ fc1.weight.t() + fc1.bias, options) @ fc2.weight.t()
        assert bias is fc2.bias
        check_gradients(got, wanted, (x, fc1.weight, fc1.bias, fc2.weight))


@pytest.mark.parametrize("plugins", [case((), id="one by one"), case(["gmm"], id="grouped")])
@pytest.mark.parametrize("options", [BIASES, *CHANGES.values()], ids=["biases", *CHANGES])
def test_experts_have_the_biases_and_activation_of_their_options(
    options: dict[str, Any], plugins: Sequence[str]
) -> None:
    options = {**options, **BIASES}
    values = {**MOE, **named(options), "model.moe_aux_loss_coeff": 0.0}
    with standing_model(values, enable=plugins) as model:
        moe = model.decoder.layers[0].mlp
        randomize_biases(moe)
        x, router, experts = hidden_states(), moe.router, moe.experts
        assert [name for name, _ in experts.named_parameters()] == [
            *("fc1", "fc2", "fc1_bias", "fc2_bias")
        ]
        got, _ = moe(x)
        scores = x.flatten(0, 1) @ router.weight.t() + router.bias
        best = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(1, best.indices, best.values.softmax(-1))
        outputs = [
            activated(x.flatten(0, 1) @ fc1.t() + fc1_bias, options) @ fc2.t() + fc2_bias
            for fc1, fc2, fc1_bias, fc2_bias in zip(*experts.parameters(), strict=True)
        ]
        wanted = sum(weights[:, n, None] * out for n, out in enumerate(outputs)).view_as(x)
        check_gradients(got, wanted, (x, router.weight, router.bias, *experts.parameters()))


def test_one_option_adds_every_bias_and_one_kind_may_be_left_out() -> None:
    everything = {"add_bias_linear": True, "add_qkv_bias": False}
    for more, kinds in (
        ({}, {"self_attention", "router", "experts"}),
        ({"add_router_bias": False}, {"self_attention", "experts"}),
        ({"add_expert_bias": False}, {"self_attention", "router"}),
    ):
        with standing_model({**MOE, **named({**everything, **more})}) as model:
            layer = model.decoder.layers[1]
            names = [name.split(".") for name, _ in layer.named_parameters() if "bias" in name]
            assert {words[-2 if "mlp" in words else 0] for words in names} == kinds
