"""Sinks, soft cap and dropout as options of ``[model]``: they reach the kernel, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.core.config.attention_needs import AttentionPart, attention_problems
from ascend_run.core.model.attention import attend as run_attention
from ascend_run.plugin_api import AttentionFeatures, AttentionSpec, HookError
from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention
from ascend_run.testing.parity import Parity
from ascend_run.testing.tensors import full_tensors
from tests.support.attention_reference import attend
from tests.support.needed_plugins import case
from tests.support.probed_runs import built
from tests.support.tiny_configs import config_with

SINKS = {"model.softmax_type": "learnable"}
CAP = {"model.attn_logit_softcapping": 0.2}
L2 = {"model.qk_l2_norm": True}


@pytest.mark.parametrize("kind", ["learnable", "off-by-one", "vanilla"])
@pytest.mark.parametrize("cap", [None, 0.3])
def test_core_attention_follows_the_formula(tmp_path: Path, kind: str, cap: float | None) -> None:
    values = {"model.softmax_type": kind, "model.attn_logit_softcapping": cap}
    with built(tmp_path, values={k: v for k, v in values.items() if v is not None}) as (_, context):
        layer = context.models["policy"].chunks[0].module.decoder.layers[0]
        core = layer.self_attention.core_attention.eval()
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(7, 2, heads, 4, generator=generator) for heads in (8, 2, 2))
        found = core(q, k, v)
        sinks = {
            "learnable": core.softmax_offset,
            "off-by-one": torch.zeros(8),
            "vanilla": None,
        }[kind]
    spec = AttentionSpec(scale=0.5, sinks=sinks, softcap=cap)
    want, _ = attend(q, k, v, spec)
    assert torch.allclose(found, want.flatten(2), atol=1e-5)
    names = [name for name, _ in core.named_parameters()]
    assert names == (["softmax_offset"] if kind == "learnable" else [])
    assert not list(core.state_dict()) or kind == "learnable"


class Noting(FusedCpuAttention):
    """How many gradients it answered."""

    def backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        gradients = super().backward(*arguments)
        self.returned = len(gradients)
        return gradients


@pytest.mark.parametrize("learned", [True, False])
def test_a_bias_has_a_gradient_where_it_requires_one(learned: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 2, 4, 4), (7, 2, 2, 4), (7, 2, 2, 4), (2, 1, 7, 7), (4,))
    q, k, v, bias, sinks = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v, *([bias] if learned else []), sinks)]
    spec = AttentionSpec(scale=0.5, bias=bias, bias_requires_grad=learned, sinks=sinks)
    kernel = Noting()
    found = torch.autograd.grad(run_attention(kernel, q, k, v, spec).square().sum(), leaves)
    want = torch.autograd.grad(attend(q, k, v, spec)[0].square().sum(), leaves)
    assert kernel.returned == len(leaves)
    for ours, theirs in zip(found, want, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


class TooMany(FusedCpuAttention):
    def backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        return (*super().backward(*arguments), torch.zeros(()))


def test_a_kernel_that_returns_other_gradients_is_named() -> None:
    q = torch.randn(7, 2, 4, 4, requires_grad=True)
    out = run_attention(TooMany(), q, q.detach(), q.detach(), AttentionSpec(scale=0.5))
    with pytest.raises(HookError, match="backward of TooMany returns 4 gradients, expected 3"):
        out.sum().backward()


LAYOUTS = [
    case((), {"tp": 2}),
    case((), {"pp": 2}),
    case(("ulysses",), {"cp": 2, "tp": 2}),
    case(("ring-attention",), {"cp": 2}),
]


@pytest.mark.exhaustive(by=lambda layout: layout)
@pytest.mark.parametrize(("plugins", "layout"), LAYOUTS, ids=str)
def test_every_layout_trains_sinks_and_caps_scores_alike(
    parity: Parity, plugins: tuple[str, ...], layout: dict[str, int]
) -> None:
    outcomes = parity(plugins, layout=layout, config={**SINKS, **CAP})
    tensors = full_tensors(outcomes).tensors
    sinks = [tensor for name, tensor in tensors.items() if name.endswith("softmax_offset")]
    assert [tensor.shape for tensor in sinks] == [(8,), (8,)]
    assert all((tensor != 0).all() for tensor in sinks)


@pytest.mark.exhaustive(by=lambda layout: [])
@pytest.mark.parametrize(("plugins", "layout"), LAYOUTS, ids=str)
def test_every_layout_trains_alike_with_l2_norms_of_heads(
    parity: Parity, plugins: tuple[str, ...], layout: dict[str, int]
) -> None:
    normed = full_tensors(parity(plugins, layout=layout, config=L2)).tensors
    assert not [name for name in normed if "q_layernorm" in name or "k_layernorm" in name]
    plain = full_tensors(parity(plugins, layout=layout)).tensors
    name = next(name for name in plain if name.endswith("linear_qkv.weight"))
    assert not torch.allclose(normed[name], plain[name])


def test_recomputed_sinks_have_the_same_gradients(parity: Parity) -> None:
    recomputed = {"model.recompute_granularity": "selective"}
    parity((), layout={"tp": 2}, config={**SINKS, **CAP, **recomputed})


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        ({"model__softmax_type": "learnable"}, "sinks"),
        ({"model__attn_logit_softcapping": 2.0}, "softcap"),
    ],
)
def test_a_kernel_that_cannot_is_refused_when_planned(values: dict[str, Any], feature: str) -> None:
    config = config_with(model__attention_dropout=0, **values)
    can = AttentionFeatures.all_but(feature)
    (problem,) = attention_problems(config, [AttentionPart(plugin="kernel", can=can)])
    assert f"does not do '{feature}'" in problem
    every = [AttentionPart(plugin="kernel", can=AttentionFeatures.all_but())]
    assert not list(attention_problems(config, every))
