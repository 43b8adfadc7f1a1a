"""The router against its formulas, written plainly, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.core.model.router import Router
from ascend_run.ops.experts.expert_load import ExpertLoad
from ascend_run.plugin_api import ConfigError
from ascend_run.testing.models import MOE
from tests.support.small_runs import standing_model

EXPERTS, TOPK, HIDDEN = 4, 2, 32
EXACT = {"rtol": 1e-12, "atol": 1e-14}


@contextmanager
def router(**model: Any) -> Iterator[Router]:
    values = {**MOE, **{f"model.{name}": value for name, value in model.items()}}
    with standing_model(values) as built:
        yield built.decoder.layers[0].mlp.router


def tokens() -> Tensor:
    """[S, B, H]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(16, 2, HIDDEN, dtype=torch.float64, generator=generator)


def rows_of_the_largest(scores_TX: Tensor) -> list[list[int]]:
    """Each token's experts, the best first, without topk."""
    return [sorted(range(EXPERTS), key=lambda x: -row[x])[:TOPK] for row in scores_TX.tolist()]


def softmax(logits: Tensor) -> Tensor:
    powers = (logits - logits.max(dim=-1, keepdim=True).values).exp()
    return powers / powers.sum(dim=-1, keepdim=True)


def expected_weights(logits_TX: Tensor, score: str, pre_softmax: bool, scaling: float) -> Tensor:
    """[T, X], by a loop over tokens."""
    weights = []
    for logits in logits_TX.unbind(0):
        (chosen,) = rows_of_the_largest(logits[None])
        if score == "sigmoid":
            raw = 1 / (1 + (-logits[chosen]).exp())
            values = raw / raw.sum()
        elif pre_softmax:
            values = softmax(logits)[chosen]
        else:
            values = softmax(logits[chosen])
        weights.append(torch.zeros_like(logits).index_put((torch.tensor(chosen),), values))
    return torch.stack(weights) * scaling


@pytest.mark.parametrize(
    ("score", "pre_softmax"), [("softmax", False), ("softmax", True), ("sigmoid", False)]
)
@pytest.mark.parametrize("scaling", [None, 2.5])
def test_weights_and_their_gradients_follow_the_formula(
    score: str, pre_softmax: bool, scaling: float | None
) -> None:
    with router(
        moe_router_score_function=score,
        moe_router_pre_softmax=pre_softmax,
        moe_router_topk_scaling_factor=scaling,
        moe_aux_loss_coeff=0.0,
    ) as module:
        x = tokens()
        got, routing_map = module(x)
        wanted = expected_weights(
            x.flatten(0, 1) @ module.weight.t(), score, pre_softmax, scaling or 1.0
        )
        torch.testing.assert_close(got, wanted, **EXACT)
        assert torch.equal(routing_map, wanted > 0)
        # Not the sum, whose gradient is none where the weights are normalised.
        factors = torch.linspace(0.5, 2.0, got.numel(), dtype=torch.float64).view_as(got)
        (gradient,) = torch.autograd.grad((got * factors).sum(), module.weight)
        (right,) = torch.autograd.grad((wanted * factors).sum(), module.weight)
        torch.testing.assert_close(gradient, right, **EXACT)


def test_sparse_mixer_is_used_where_its_threshold_is_set() -> None:
    """The weight of each expert is its share among those near it."""
    with router(moe_sparsemixer_eps=0.3, moe_aux_loss_coeff=0.0) as module:
        logits = torch.tensor([[[2.0, 1.0, 1.9, -3.0]]], dtype=torch.float64)
        weights, routing_map = module.routing(logits)
    # 1 is within 2 * 0.3 of 2 relative to 2, and of 1.9 relative to 1.9; -3 is near neither.
    first, second = (
        torch.tensor(x, dtype=torch.float64).softmax(0)[0] for x in ([2.0, 1, 1.9], [1.9, 1])
    )
    assert routing_map.tolist() == [[True, False, True, False]]
    torch.testing.assert_close(weights[0, [0, 2]], torch.stack((first, second)), **EXACT)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balancing_loss_adds_the_gradient_of_its_formula(score: str) -> None:
    """Switch's ``coefficient * X * sum_i f_i P_i``, a mean over tokens, times the tokens."""
    coefficient = 0.3
    with router(moe_router_score_function=score, moe_aux_loss_coeff=coefficient) as module:
        x = tokens()
        probs, routing_map = module(x)
        (gradient,) = torch.autograd.grad(0 * probs.sum(), module.weight)
        logits = x.flatten(0, 1) @ module.weight.t()
        scores = softmax(logits)
        if score == "sigmoid":
            scores = 1 / (1 + (-logits).exp())
            scores = scores / scores.sum(dim=-1, keepdim=True)
        fractions = routing_map.double().mean(dim=0) / TOPK
        loss = coefficient * EXPERTS * (fractions * scores.mean(dim=0)).sum()
        (right,) = torch.autograd.grad(loss * logits.shape[0], module.weight)
        torch.testing.assert_close(gradient, right, **EXACT)
        taken = module.take_aux_losses()
        torch.testing.assert_close(taken, torch.stack((loss.detach(), torch.ones_like(loss))))
        assert not module.take_aux_losses().any()


def test_the_balancing_loss_of_a_perfect_balance_is_its_coefficient() -> None:
    with router(moe_aux_loss_coeff=0.3) as module:
        logits = 5.0 * torch.eye(EXPERTS, dtype=torch.float64)
        module.routing((logits + logits.roll(1, dims=1))[:, None].requires_grad_())
        assert module.take_aux_losses().tolist() == pytest.approx([0.3, 1.0], rel=1e-12)


def test_the_z_loss_adds_the_gradient_of_its_formula() -> None:
    coefficient = 0.2
    with router(moe_z_loss_coeff=coefficient, moe_aux_loss_coeff=0.0) as module:
        x = tokens()
        probs, _ = module(x)
        (gradient,) = torch.autograd.grad(0 * probs.sum(), module.weight)
        logits = x.flatten(0, 1) @ module.weight.t()
        loss = coefficient * (logits.exp().sum(dim=-1).log() ** 2).sum()
        (right,) = torch.autograd.grad(loss, module.weight)
        torch.testing.assert_close(gradient, right, **EXACT)


def test_evaluation_adds_no_loss() -> None:
    with router(moe_z_loss_coeff=0.1) as module:
        module.eval()
        module(tokens())
        assert not module.take_aux_losses().any()


def test_the_loss_of_each_sequence_adds_the_gradient_of_its_formula() -> None:
    """The mean over two sequences of what the balancing loss of each alone is."""
    coefficient = 0.3
    with router(
        moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=coefficient
    ) as module:
        x = tokens()
        probs, routing_map = module(x)
        (gradient,) = torch.autograd.grad(0 * probs.sum(), module.weight)
        losses = []
        for sequence in range(2):
            scores = softmax(x[:, sequence] @ module.weight.t())
            chosen = routing_map.view(16, 2, EXPERTS)[:, sequence]
            fractions = chosen.double().mean(dim=0) / TOPK
            losses.append(EXPERTS * (fractions * scores.mean(dim=0)).sum())
        loss = coefficient * sum(losses) / 2
        (right,) = torch.autograd.grad(loss * 32, module.weight)
        torch.testing.assert_close(gradient, right, **EXACT)
        mean, count = module.take_aux_losses().tolist()
        assert (mean, count) == (pytest.approx(float(loss), rel=1e-12), 1.0)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_beside_a_bias_the_loss_counts_the_selection_without_it(kind: str) -> None:
    """As equation 18 of arXiv:2412.19437: the bias balances tokens, the loss balances scores."""
    with router(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=1.0,
    ) as module:
        module.expert_bias[0] = 2.0
        x = tokens()[:, :1]
        probs, routing_map = module(x)
        assert routing_map[:, 0].all()
        (gradient,) = torch.autograd.grad(0 * probs.sum(), module.weight)
        scores = 1 / (1 + (-x.flatten(0, 1) @ module.weight.t()).exp())
        best = torch.tensor(rows_of_the_largest(scores))
        counts = torch.bincount(best.flatten(), minlength=EXPERTS).double()
        assert not torch.equal(counts, routing_map.sum(dim=0).double())
        shares = scores / scores.sum(dim=-1, keepdim=True)
        loss = EXPERTS * (counts / counts.sum() * shares.sum(dim=0)).sum()
        (right,) = torch.autograd.grad(loss, module.weight)
        torch.testing.assert_close(gradient, right, **EXACT)


def test_forced_balance_is_what_the_loss_counts_beside_a_bias() -> None:
    """As without the bias: of equal loads, the coefficient."""
    with router(
        moe_router_force_load_balancing=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_aux_loss_coeff=0.3,
    ) as module:
        module(tokens())
        assert module.take_aux_losses().tolist() == pytest.approx([0.3, 1.0], rel=1e-12)


def test_a_mask_of_padded_tokens_is_refused() -> None:
    with router() as module, pytest.raises(NotImplementedError, match="padded tokens"):
        module(tokens(), padding_mask=torch.zeros(2, 16, dtype=torch.bool))


SINKHORN = {
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_pre_softmax": True,
}


def test_sinkhorn_selects_in_training_and_weighs_by_the_softmax() -> None:
    with router(**SINKHORN) as module, torch.no_grad():
        module.weight[0] += 0.5 * module.weight[1]
        x = tokens() + 0.3
        logits = x.flatten(0, 1) @ module.weight.t()
        weights, routing_map = module(x)
        plain = softmax(logits)
        assert torch.equal(weights, weights * routing_map)
        torch.testing.assert_close(weights, plain * routing_map, **EXACT)
        # Scaled to equal sums of columns, and of rows last.
        plan = plain
        for _ in range(3000):
            plan = plan / plan.sum(dim=0)
            plan = plan / plan.sum(dim=1, keepdim=True)
        wanted = rows_of_the_largest(plan)
        assert [sorted(row) for row in wanted] == [
            row.nonzero().flatten().tolist() for row in routing_map
        ]
        assert wanted != rows_of_the_largest(logits)
        module.eval()
        _, evaluated = module(x)
        assert [sorted(row) for row in rows_of_the_largest(logits)] == [
            row.nonzero().flatten().tolist() for row in evaluated
        ]


def test_forced_balance_loads_all_experts_equally() -> None:
    with router(moe_router_force_load_balancing=True, moe_aux_loss_coeff=0.0) as module:
        x = tokens()
        weights, routing_map = module(x)
        assert routing_map.sum(dim=0).tolist() == [32 * TOPK // EXPERTS] * EXPERTS
        assert routing_map.sum(dim=1).tolist() == [TOPK] * 32
        logits = x.flatten(0, 1) @ module.weight.t()
        wanted = torch.zeros_like(logits)
        rows = [softmax(row[chosen]) for row, chosen in zip(logits, routing_map, strict=True)]
        wanted = wanted.masked_scatter(routing_map, torch.cat(rows))
        torch.testing.assert_close(weights, wanted, **EXACT)
        factors = torch.linspace(0.5, 2.0, weights.numel(), dtype=torch.float64).view_as(weights)
        (gradient,) = torch.autograd.grad((weights * factors).sum(), module.weight)
        (right,) = torch.autograd.grad((wanted * factors).sum(), module.weight)
        torch.testing.assert_close(gradient, right, **EXACT)


def test_jitter_scales_the_input_of_the_router_in_training_alone() -> None:
    with router(moe_input_jitter_eps=0.2, moe_aux_loss_coeff=0.0) as module:
        seen: list[Tensor] = []
        module.routing = lambda logits: seen.append(logits)
        with torch.no_grad():
            module.weight.zero_()
            module.weight[:, 3] = 1.0  # the logits are one element of the input
        x = tokens().requires_grad_()
        state = torch.get_rng_state()
        module(x)
        module(x)
        torch.set_rng_state(state)  # as recomputation does
        module(x)
        module.eval()
        module(x)
        plain = x[..., 3:4].expand(-1, -1, EXPERTS)
        first, second, again, evaluated = seen
        assert torch.equal(again, first)
        assert not torch.equal(second, first)
        torch.testing.assert_close(evaluated, plain, **EXACT)
        noise = (first / plain)[..., 0].flatten()
        assert 0.8 <= noise.min() < 0.85
        assert 1.15 < noise.max() < 1.2
        assert len(noise.unique()) == 32
        (gradient,) = torch.autograd.grad(first[..., 0].sum(), x)
        torch.testing.assert_close(gradient[..., 3].flatten(), noise, **EXACT)


def test_sparse_mixer_draws_in_training_alone() -> None:
    with router(
        moe_sparsemixer_eps=0.3, moe_sparsemixer_sampling=True, moe_aux_loss_coeff=0.0
    ) as module:
        logits = torch.tensor([2.0, 1.9, 1.8, -3.0], dtype=torch.float64).expand(400, 1, 4)
        _, drawn = module.routing(logits)
        module.eval()
        _, best = module.routing(logits)
    assert best.sum(dim=0).tolist() == [400, 400, 0, 0]
    assert drawn.sum(dim=1).tolist() == [2] * 400
    assert drawn[:, 2].sum() > 100
    assert not drawn[:, 3].any()  # it is not near the best


@pytest.mark.parametrize("frozen", [True, False])
def test_the_bias_of_a_frozen_router_counts_no_token(frozen: bool) -> None:
    """Megatron moves a bias by these counts, and adapters do not hold it."""
    with router(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True) as module:
        module.weight.requires_grad_(not frozen)
        module(tokens())
        assert int(module.local_tokens_per_expert.sum()) == (0 if frozen else 32 * TOPK)


@pytest.mark.parametrize(
    ("dtype", "name", "wide"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.bfloat16, "fp64", torch.float64),
        (torch.float64, None, torch.float64),
    ],
)
def test_logits_are_taken_in_the_widest_dtype(
    dtype: torch.dtype, name: str | None, wide: torch.dtype
) -> None:
    values = MOE if name is None else {**MOE, "model.moe_router_dtype": name}
    with standing_model(values, dtype) as model:
        module = model.decoder.layers[0].mlp.router
        x = tokens().to(dtype)
        logits = module.gating(x)
        assert logits.dtype is wide
        assert torch.equal(logits, x.to(wide) @ module.weight.to(wide).t())


@pytest.mark.parametrize("pads", [False, True])
def test_dropped_tokens_count_for_balance_and_load(pads: bool) -> None:
    """Bias, balancing loss and load are of what the tokens select."""
    options = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "aux_loss",
    }
    capacity = {"moe_expert_capacity_factor": 0.3, "moe_pad_expert_input_to_capacity": pads}
    seen = []
    for more in ({}, capacity):
        with router(**options, **more) as module:
            load = ExpertLoad(module)
            _, routing_map = module(tokens())
            seen.append([module.local_tokens_per_expert.tolist(), module.take_aux_losses()])
            tokens_X, dropped = load.take(), int(load.take_dropped())
            assert tokens_X is not None
            assert tokens_X.tolist() == seen[-1][0]
    assert seen[0][0] == seen[1][0]
    torch.testing.assert_close(seen[0][1], seen[1][1], rtol=0, atol=0)
    loads, kept = routing_map.sum(dim=0).tolist(), [min(5, int(n)) for n in tokens_X]
    assert loads == ([5] * EXPERTS if pads else kept)
    assert dropped == 64 - sum(kept)
    assert dropped > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_load_balancing_type", "global_aux_loss"),
        ("moe_router_load_balancing_type", ["aux_loss", "seq_aux_loss"]),
        ("moe_router_load_balancing_type", "sinkhorn"),  # with a balancing loss
        ("moe_enable_routing_replay", True),
        ("moe_expert_capacity_factor", 0.0),
    ],
)
def test_what_this_router_does_not_do_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name), router(**{name: value}):
        pass
