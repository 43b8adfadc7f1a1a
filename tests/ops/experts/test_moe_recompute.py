"""A layer whose experts are recomputed, against a formula for each token, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_run.core.model.forward_chain import install
from ascend_run.ops.experts.loop_experts import loop_experts
from ascend_run.ops.experts.moe_recompute import MoeRecompute, Saves
from ascend_run.ops.recomputed import RandomState
from ascend_run.types.forward import LinkPlace, NamedLink
from ascend_run.types.moe import ExpertActivation, ExpertWeights

# T tokens, H hidden size, F width, X experts

T, H, F_, X, TOPK = 12, 6, 5, 4, 2


class Router(nn.Module):
    """Sends all tokens to the first expert and to the second or the third one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(X, H, dtype=torch.float64))
        self.calls = 0

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        logits = x_TH @ self.weight.t()
        map_TX = torch.zeros(T, X, dtype=torch.bool)
        map_TX[:, 0] = True
        map_TX[torch.arange(T), 1 + torch.arange(T) % 2] = True
        return logits.masked_fill(~map_TX, -torch.inf).softmax(-1), map_TX


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Parameter(torch.randn(X, 2 * F_, H, dtype=torch.float64))
        self.fc2 = nn.Parameter(torch.randn(X, H, F_, dtype=torch.float64))

    def forward(self, tokens: Tensor, counts: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        weights = ExpertWeights(self.fc1, self.fc2)
        act = ExpertActivation(function=F.silu)
        return loop_experts(tokens, counts.tolist(), probs, weights, act), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts()
        self.shared_experts = nn.Sequential(
            nn.Linear(H, F_, dtype=torch.float64), nn.GELU(), nn.Linear(F_, H, dtype=torch.float64)
        )
        self.dispatches = self.combinations = 0

    def forward(self, x_TH: Tensor) -> Tensor:
        shared = self.shared_experts(x_TH)
        probs_TX, map_TX = self.router(x_TH)
        self.dispatches += 1
        expert, token = map_TX.t().nonzero(as_tuple=True)
        out, _ = self.experts(x_TH[token], map_TX.sum(0), probs_TX[token, expert])
        self.combinations += 1
        return torch.zeros_like(x_TH).index_add(0, token, out) + shared


def formula(layer: Layer, x_TH: Tensor) -> Tensor:
    rows = []
    for at, x in enumerate(x_TH):
        chosen = [0, 1 + at % 2]
        weights = (layer.router.weight[chosen] @ x).softmax(0)
        y = layer.shared_experts(x)
        for weight, expert in zip(weights, chosen, strict=True):
            hidden = layer.experts.fc1[expert] @ x
            gate, up = hidden[:F_], hidden[F_:]
            y = y + layer.experts.fc2[expert] @ (gate * gate.sigmoid() * up) * weight
        rows.append(y)
    return torch.stack(rows)


def no_draws() -> RandomState:
    @contextmanager
    def state() -> Iterator[None]:
        yield

    return state


def recomputing(saves: Saves) -> Layer:
    torch.manual_seed(0)
    layer = Layer()
    links = MoeRecompute(layer, lambda *_: saves, no_draws, shared=True).links()
    install(
        layer,
        {
            layer.get_submodule(name): [
                NamedLink(name="recomputing", place=LinkPlace.AROUND, link=link)
            ]
            for name, link in links.items()
        },
    )
    return layer


@pytest.mark.parametrize("saves", Saves)
def test_output_and_gradients_are_those_of_the_formula(saves: Saves) -> None:
    """One expert has every token, and one has none."""
    layer = recomputing(saves)
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(T, H, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    out, expected = layer(x), formula(layer, x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    pairs = zip(
        torch.autograd.grad(out, leaves, dy),
        torch.autograd.grad(expected, leaves, dy),
        strict=True,
    )
    for found, right in pairs:
        assert (found - right).abs().max() <= 1e-10 * right.abs().max()


@pytest.mark.parametrize(("saves", "dispatches"), [("ALL", 1), ("TOKENS", 1), ("NOTHING", 2)])
def test_only_the_way_to_the_experts_is_repeated(saves: str, dispatches: int) -> None:
    layer = recomputing(Saves[saves])
    layer(torch.randn(T, H, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert (layer.router.calls, layer.dispatches, layer.combinations) == (1, dispatches, 1)


def test_without_gradients_nothing_is_repeated() -> None:
    layer = recomputing(Saves.NOTHING)
    x = torch.randn(T, H, dtype=torch.float64)
    with torch.no_grad():
        out = layer(x)
    torch.testing.assert_close(out, formula(layer, x).detach(), rtol=0, atol=1e-12)
    assert layer.dispatches == 1


def test_two_forwards_before_their_backwards_keep_apart() -> None:
    layer = recomputing(Saves.NOTHING)
    first, second = (torch.randn(T, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
    outs = layer(first), layer(second)
    for x, out in zip((first, second), outs, strict=True):
        (found,) = torch.autograd.grad(out.square().sum(), [x])
        (right,) = torch.autograd.grad(formula(layer, x).square().sum(), [x])
        assert (found - right).abs().max() <= 1e-10 * right.abs().max()


def test_a_forward_that_saves_other_tensors_when_repeated_is_an_error() -> None:
    layer = recomputing(Saves.TOKENS)
    out = layer(torch.randn(T, H, dtype=torch.float64, requires_grad=True))
    original = layer.experts.fc1
    layer.experts.fc1 = nn.Parameter(original.detach()[:, :4])
    with pytest.raises(RuntimeError, match="saved other tensors"):
        out.sum().backward()
