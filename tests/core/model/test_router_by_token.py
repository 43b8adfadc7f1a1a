"""The router against formulas written token by token: weights, losses and every gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from ascend_run.testing.models import MOE
from tests.support.small_runs import standing_model

HIDDEN: Final = 32
EXACT: Final = {"rtol": 1e-10, "atol": 1e-12}
SIGMOID: Final = {"moe_router_score_function": "sigmoid"}
ROUTERS: Final[dict[str, dict[str, Any]]] = {
    "softmax of the selected": {"moe_router_load_balancing_type": "aux_loss"},
    "softmax of all": {
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "sigmoid, bias and groups": {
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_load_balancing_type": "seq_aux_loss",
        **SIGMOID,
    },
    "groups": {
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "aux_loss",
    },
    "in turn": {
        "moe_router_force_load_balancing": True,
        "moe_router_load_balancing_type": "aux_loss",
        **SIGMOID,
    },
    "dropped by weight": {
        "moe_expert_capacity_factor": 0.6,
        "moe_router_load_balancing_type": "aux_loss",
    },
    "dropped by position": {
        "moe_expert_capacity_factor": 0.6,
        "moe_token_drop_policy": "position",
        "moe_router_load_balancing_type": "seq_aux_loss",
        **SIGMOID,
    },
    "sparse mixer": {
        "moe_sparsemixer_eps": 0.3,
        "moe_router_load_balancing_type": "aux_loss",
    },
}


def plain(weight_XH: Tensor, x_SBH: Tensor) -> None:
    weight_XH.mul_(20)


def one_expert(weight_XH: Tensor, x_SBH: Tensor) -> None:
    """Every token selects expert 4, and scores 5 of its group as high."""
    x_SBH[..., 0] = 1.0
    weight_XH[4:6, 0] = 9.0


def equal_scores(weight_XH: Tensor, x_SBH: Tensor) -> None:
    """Experts tie in twos, and in fours; a score is a single product."""
    weight_XH.zero_()
    weight_XH[:, 0] = torch.arange(len(weight_XH)) // 2 % 4 * 0.5


CASES: Final[dict[str, tuple[int, Callable[[Tensor, Tensor], None]]]] = {
    "plain": (8, plain),
    "all tokens on one expert": (8, one_expert),
    "equal scores": (8, equal_scores),
    "experts without tokens": (32, plain),
}
"""Case -> number of experts, and what is done with weights and tokens."""


def ordered(scores: list[float], among: list[int]) -> list[int]:
    return sorted(among, key=lambda expert: (-scores[expert], expert))


def selected(scores: list[float], topk: int, options: dict[str, Any]) -> list[int]:
    """The experts of a token, the best first."""
    everyone = list(range(len(scores)))
    if "moe_router_num_groups" not in options:
        return ordered(scores, everyone)[:topk]
    size = len(scores) // options["moe_router_num_groups"]
    best = 2 if options.get("moe_router_score_function") == "sigmoid" else 1
    ranks = [sum(sorted(scores[first : first + size])[-best:]) for first in everyone[::size]]
    kept = ordered(ranks, list(range(len(ranks))))[: options["moe_router_group_topk"]]
    return ordered(scores, [x for x in everyone if x // size in kept])[:topk]


def weights_of(row: Tensor, chosen: list[int], options: dict[str, Any]) -> Tensor:
    """The weights of a token's experts, in their order."""
    if (eps := options.get("moe_sparsemixer_eps")) is not None:
        found, left, values = [], list(range(len(row))), row.tolist()
        for expert in chosen:
            best = values[expert]
            near = [x for x in left if best - values[x] <= 2 * eps * max(abs(values[x]), best)]
            found.append((row[expert] - row[near].logsumexp(0)).exp())
            left.remove(expert)
        return torch.stack(found)
    if options.get("moe_router_score_function") == "sigmoid":
        scores = 1 / (1 + (-row[chosen]).exp())
        return scores / scores.sum()
    over = row if options.get("moe_router_pre_softmax") else row[chosen]
    return (row[chosen] - over.logsumexp(0)).exp() * options.get(
        "moe_router_topk_scaling_factor", 1.0
    )


def kept_share(weights_TX: Tensor, options: dict[str, Any]) -> Tensor:
    """1 for the tokens that an expert keeps, else 0; weights that differ by rounding are equal."""
    rows, kept = weights_TX.detach().round(decimals=9).tolist(), torch.zeros_like(weights_TX)
    capacity = math.ceil(len(rows) * 2 / len(rows[0]) * options["moe_expert_capacity_factor"])
    for expert in range(len(rows[0])):
        mine = [token for token, row in enumerate(rows) if row[expert] > 0]
        if "moe_token_drop_policy" not in options:
            mine.sort(key=lambda token, e=expert: (-rows[token][e], token))
        kept[mine[:capacity], expert] = 1
    return kept


def reference(
    x_SBH: Tensor, weight_XH: Tensor, bias_X: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the weights [T, X], and both losses times the number of tokens."""
    length, rows, experts = *x_SBH.shape[:2], len(weight_XH)
    is_sigmoid = options.get("moe_router_score_function") == "sigmoid"
    weights, loss = [], torch.zeros((), dtype=torch.float64)
    counts = torch.zeros(rows, experts, dtype=torch.float64)
    shares = torch.zeros(rows, experts, dtype=torch.float64)
    for place in range(length):
        for sequence in range(rows):
            row = weight_XH @ x_SBH[place, sequence]
            scores = 1 / (1 + (-row).exp()) if is_sigmoid else row
            own = selected(scores.tolist(), 2, options)
            chosen = own
            if "moe_router_enable_expert_bias" in options:
                chosen = selected((scores + bias_X).tolist(), 2, options)
            if "moe_router_force_load_balancing" in options:
                first = 2 * (place * rows + sequence)
                own = chosen = [first % experts, (first + 1) % experts]
            weights.append(
                torch.zeros(experts, dtype=torch.float64).index_put(
                    (torch.tensor(chosen),), weights_of(row, chosen, options)
                )
            )
            share = scores / scores.sum() if is_sigmoid else (row - row.logsumexp(0)).exp()
            shares = shares.index_put((torch.tensor(sequence),), share, accumulate=True)
            counts[sequence, own] += 1
            loss = loss + 0.2 * row.logsumexp(0) ** 2
    if options["moe_router_load_balancing_type"] == "aux_loss":
        counts, shares = counts.sum(dim=0, keepdim=True), shares.sum(dim=0, keepdim=True)
    for count, share in zip(counts, shares, strict=True):
        loss = loss + 0.3 * experts * (count / count.sum() * share).sum()
    weights_TX = torch.stack(weights)
    if "moe_expert_capacity_factor" in options:
        weights_TX = weights_TX * kept_share(weights_TX, options)
    return weights_TX, loss


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ROUTERS)
def test_weights_losses_and_every_gradient_follow_the_formulas(name: str, case: str) -> None:
    options, (experts, change) = ROUTERS[name], CASES[case]
    draw = torch.Generator().manual_seed(8)
    x = torch.randn(5, 2, HIDDEN, dtype=torch.float64, generator=draw)
    bias = torch.randn(experts, generator=draw) / 10
    values = {f"model.{key}": value for key, value in options.items()}
    losses = {"model.moe_aux_loss_coeff": 0.3, "model.moe_z_loss_coeff": 0.2}
    with standing_model({**MOE, "model.num_moe_experts": experts, **values, **losses}) as model:
        router = model.decoder.layers[0].mlp.router
        with torch.no_grad():
            change(router.weight, x)
            if router.expert_bias is not None:
                router.expert_bias.copy_(bias)
        x.requires_grad_()
        weights, routing_map = router(x)
        wanted, loss = reference(x, router.weight, bias.double(), options)
        torch.testing.assert_close(weights, wanted, **EXACT)
        assert torch.equal(routing_map, wanted > 0)
        factors = torch.randn(weights.shape, dtype=torch.float64, generator=draw)
        inputs = (x, router.weight)
        found = torch.autograd.grad((weights * factors).sum(), inputs)
        right = torch.autograd.grad((wanted * factors).sum() + loss, inputs)
        torch.testing.assert_close(found, right, **EXACT)
    loads = routing_map.sum(dim=0)
    if case == "experts without tokens":
        assert int((loads == 0).sum()) > 0
    if case == "all tokens on one expert" and "in turn" not in name:
        assert int(loads[4]) == (2 if "dropped" in name else 10)
