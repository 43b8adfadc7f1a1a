"""The loss of an output layer that is more than a matmul, against its formula in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor, nn

from ascend_run.plugin_api import ForwardLink, LinkPlace
from ascend_run.testing.models import DENSE
from ascend_run.types.forward import Forward
from tests.support.fake_plugins import plugin
from tests.support.small_runs import standing_model

FACTOR = 1.5
TIED = {"model.share_embeddings_and_output_weights": True}


class Scaled(ColumnParallelLinear):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, bias = super().forward(*args, **kwargs)
        return logits * FACTOR, bias


def linked(model: nn.Module) -> dict[str, ForwardLink]:
    def wrap(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            logits, bias = inner(*args, **kwargs)
            return logits * FACTOR, bias

        return forward

    return {"output_layer": ForwardLink(wrap=wrap, compilable=True)}


def replaced(model: nn.Module) -> nn.Module:
    layer = copy.copy(model.output_layer)
    layer.__class__ = Scaled
    model.output_layer = layer
    return model


def hooked(model: nn.Module) -> nn.Module:
    model.output_layer.register_forward_hook(lambda _, args, out: (out[0] * FACTOR, out[1]))
    return model


def hooked_before(model: nn.Module) -> nn.Module:
    model.output_layer.register_forward_pre_hook(lambda _, args: (args[0] * FACTOR, *args[1:]))
    return model


@pytest.mark.parametrize("values", [{}, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("wrap", [linked, replaced, hooked, hooked_before])
def test_what_ascend_model_adds_to_the_output_layer_is_in_the_loss(
    wrap: Callable[[nn.Module], Any], values: dict[str, Any]
) -> None:
    """It multiplies the logits by a factor."""
    links = {"output_layer": LinkPlace.AROUND}
    scaling = plugin("scaling", {"ascend_model": lambda self: wrap}, forward_links=links)()
    ids, labels = torch.randint(90, (2, 2, 16), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 16).index_fill(1, torch.tensor([3, 8]), 0)
    seen: list[Tensor] = []
    with standing_model({**DENSE, **values}, torch.float64, (), scaling) as model:
        model.decoder.register_forward_hook(lambda _, args, hidden: seen.append(hidden))
        loss = model(ids, torch.arange(16).expand(2, -1), labels=labels, loss_mask=mask)
        weights = dict(model.named_parameters())
        got = torch.autograd.grad(loss, [*weights.values()], retain_graph=True)
        table = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
        logits_BSV = FACTOR * seen[0].transpose(0, 1) @ table[:90].t()
        picked = logits_BSV.gather(2, labels[..., None])[..., 0]
        formula = ((logits_BSV.logsumexp(dim=2) - picked) * mask).sum()
        wanted = torch.autograd.grad(formula, [*weights.values()])
    torch.testing.assert_close(loss, formula, rtol=1e-12, atol=0)
    for name, one, other in zip(weights, got, wanted, strict=True):
        assert other.any(), name
        assert (one - other).abs().max() <= 1e-12 * other.abs().max(), name
