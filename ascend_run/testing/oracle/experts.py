"""Mixture of experts: router, balancing losses, experts, shared experts.

Sources: arXiv:1701.06538; top-k then softmax, arXiv:2401.04088; softmax then top-k and balancing
loss, arXiv:2101.03961 (equation 4); z-loss, arXiv:2202.08906 (equation 5); groups of experts,
arXiv:2405.04434 (section 2.1.2); sigmoid scores, arXiv:2412.19437 (equations 12 to 16); bias of the
choice, arXiv:2408.15664; capacity, arXiv:2101.03961 (equation 3); SparseMixer without its sampling,
arXiv:2409.12136 (section 2.2); Sinkhorn's iteration, arXiv:1306.0895; shared experts,
arXiv:2401.06066.
"""

# shapes: see the package

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from ascend_run.types.config import FieldSection

from .layers import MLP, Activation, ffn_width, plus_bias

if TYPE_CHECKING:
    from .adapters import ExpertAdapter

_TINY: Final = 1e-20
"""Keeps a sum of sigmoids from 0, as in DeepSeek-V3's published code."""


class Router(nn.Module):
    """Chooses K of X experts for each token, and how much each of them counts.

    After a forward, ``loss`` holds what is added to the sum of the tokens' losses.
    """

    expert_bias: Tensor | None

    def __init__(self, model: FieldSection) -> None:
        super().__init__()
        self.model = model
        experts = model.num_moe_experts
        self.weight = nn.Parameter(torch.empty(experts, model.hidden_size))
        has_bias = model.add_bias_linear if model.add_router_bias is None else model.add_router_bias
        self.bias = nn.Parameter(torch.empty(experts)) if has_bias else None
        balances = model.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", torch.zeros(experts) if balances else None)
        self.load_X = torch.zeros(experts)
        self.loss = torch.zeros(())

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [T, X], 0 for experts that are not chosen, and which are chosen."""
        model = self.model
        logit_TX = plus_bias(x_BSH.flatten(0, 1) @ self.weight.t(), self.bias)
        score_TX, share_TX = logit_TX, logit_TX.softmax(dim=-1)
        if model.moe_router_score_function == "sigmoid":
            score_TX = logit_TX.sigmoid()
            share_TX = _normalized(score_TX)
            chosen_TX = self._chosen(score_TX, logit_TX, self.expert_bias)
            weight_TX = score_TX.masked_fill(~chosen_TX, 0)
            weight_TX = _normalized(weight_TX) if model.moe_router_topk > 1 else weight_TX
        elif model.moe_sparsemixer_eps is not None:
            weight_TX, chosen_TX = _sparse_mixer(
                logit_TX, model.moe_router_topk, model.moe_sparsemixer_eps
            )
        elif model.moe_router_pre_softmax:  # over all experts, else over the chosen ones
            chosen_TX = self._chosen(share_TX, logit_TX, self.expert_bias)
            weight_TX = share_TX.masked_fill(~chosen_TX, 0)
        else:
            chosen_TX = self._chosen(logit_TX, logit_TX, self.expert_bias)
            weight_TX = logit_TX.masked_fill(~chosen_TX, -torch.inf).softmax(dim=-1)
        # With a bias, the scores themselves are balanced: what they would choose without it.
        wanted_TX = (
            chosen_TX if self.expert_bias is None else self._chosen(score_TX, logit_TX, None)
        )
        self.loss = self._balancing_loss(share_TX, wanted_TX, len(x_BSH)) + self._z_loss(logit_TX)
        self.load_X = self.load_X + chosen_TX.sum(dim=0)
        if model.moe_expert_capacity_factor:
            chosen_TX = self._within_capacity(chosen_TX, weight_TX.detach(), len(x_BSH))
            weight_TX = weight_TX * chosen_TX
        return weight_TX * (model.moe_router_topk_scaling_factor or 1.0), chosen_TX

    def _within_capacity(self, chosen_TX: Tensor, weight_TX: Tensor, rows: int) -> Tensor:
        """Return the choices that their experts serve: those of the heaviest, or of the first
        tokens, and with padding of the first others. Tokens are numbered by position and then by
        sequence."""
        tokens, experts = chosen_TX.shape
        mean = tokens * self.model.moe_router_topk / experts
        capacity = math.ceil(mean * self.model.moe_expert_capacity_factor)
        number_T = torch.arange(tokens).view(rows, -1)
        number_T = (number_T % number_T.shape[1] * rows + number_T // number_T.shape[1]).flatten()
        served_TX = torch.zeros_like(chosen_TX)
        for expert in range(experts):
            mine = chosen_TX[:, expert].nonzero().flatten().tolist()
            mine.sort(key=number_T.tolist().__getitem__)
            if self.model.moe_token_drop_policy == "probs":
                mine.sort(key=(-weight_TX[:, expert]).tolist().__getitem__)
            if self.model.moe_pad_expert_input_to_capacity:
                others = (~chosen_TX[:, expert]).nonzero().flatten().tolist()
                mine += sorted(others, key=number_T.tolist().__getitem__)
            served_TX[mine[:capacity], expert] = True
        return served_TX

    @torch.no_grad()
    def _chosen(self, score_TX: Tensor, logit_TX: Tensor, bias_X: Tensor | None) -> Tensor:
        """Return the K best experts of each token, within its best groups of experts."""
        model = self.model
        if model.moe_router_load_balancing_type == "sinkhorn":
            score_TX = _doubly_scaled(logit_TX)
        if bias_X is not None:
            score_TX = score_TX + bias_X
        if model.moe_router_num_groups and model.moe_router_group_topk:
            score_TGx = score_TX.unflatten(-1, (model.moe_router_num_groups, -1))
            # A group is as good as its best expert, or as its two best with sigmoid scores.
            best = min(
                2 if model.moe_router_score_function == "sigmoid" else 1, score_TGx.shape[-1]
            )
            rank_TG = score_TGx.topk(best, dim=-1).values.sum(dim=-1)
            outside_TG = ~_best(rank_TG, model.moe_router_group_topk)
            score_TX = score_TGx.masked_fill(outside_TG[..., None], -torch.inf).flatten(1)
        return _best(score_TX, model.moe_router_topk)

    def _balancing_loss(self, share_TX: Tensor, chosen_TX: Tensor, rows: int) -> Tensor:
        """Return ``T * coefficient * X * sum_i f_i P_i`` of a micro-batch's T tokens.

        f is the share of choices that fall on an expert, P its mean share of the scores. The loss
        of a micro-batch counts once for each of its tokens, as in Megatron; by sequence, it is the
        mean of those of its sequences.
        """
        kind, coefficient = (
            self.model.moe_router_load_balancing_type,
            self.model.moe_aux_loss_coeff,
        )
        loss = share_TX.new_zeros(())
        if kind not in ("aux_loss", "seq_aux_loss") or not coefficient:
            return loss
        sequences = rows if kind == "seq_aux_loss" else 1
        for share, chosen in zip(
            share_TX.chunk(sequences), chosen_TX.chunk(sequences), strict=True
        ):
            fraction_X = chosen.to(share).sum(dim=0) / chosen.sum()
            loss = loss + share.shape[1] * (fraction_X * share.mean(dim=0)).sum() / sequences
        weighted: Tensor = len(share_TX) * coefficient * loss
        return weighted

    def _z_loss(self, logit_TX: Tensor) -> Tensor:
        """Return ``T * coefficient * mean(logsumexp(logits) ** 2)``."""
        z_T = logit_TX.logsumexp(dim=-1).square()
        return (self.model.moe_z_loss_coeff or 0.0) * z_T.sum()

    @torch.no_grad()
    def update_bias(self) -> None:
        """Raise the bias of experts with less than the mean load of the step, lower the others'."""
        if self.expert_bias is not None and self.weight.requires_grad:
            missing_X = self.load_X.mean() - self.load_X
            self.expert_bias += self.model.moe_router_bias_update_rate * missing_X.sign()
        self.load_X = torch.zeros_like(self.load_X)


def _normalized(score_TX: Tensor) -> Tensor:
    return score_TX / (score_TX.sum(dim=-1, keepdim=True) + _TINY)


def _sparse_mixer(logit_TX: Tensor, count: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """Choose one expert after the other; each is weighted by its share of a softmax over those left
    that are near the best one. Return the weights, and which experts are chosen."""
    chosen_TX = torch.zeros_like(logit_TX, dtype=torch.bool)
    weight_TX = torch.zeros_like(logit_TX)
    for _ in range(count):
        left_TX = logit_TX.masked_fill(chosen_TX, -torch.inf)
        best_T1, one_TX = left_TX.amax(dim=-1, keepdim=True).detach(), _best(left_TX, 1)
        size_TX = torch.maximum(logit_TX.abs(), best_T1)
        is_near_TX = ((best_T1 - logit_TX) / size_TX <= 2 * epsilon).detach()
        share_TX = left_TX.masked_fill(~is_near_TX, -torch.inf).softmax(dim=-1)
        weight_TX = torch.where(one_TX, share_TX, weight_TX)
        chosen_TX = chosen_TX | one_TX
    return weight_TX, chosen_TX


def _best(score_TX: Tensor, count: int) -> Tensor:
    """Return whether each entry is among the ``count`` largest of its row, of equal ones the first
    of them."""
    index_TX = score_TX.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(score_TX, dtype=torch.bool).scatter(1, index_TX[:, :count], True)


def _doubly_scaled(logit_TX: Tensor) -> Tensor:
    """Return ``exp(logits)`` with rows and columns multiplied so that every token has one share,
    and every expert the same number of shares; Sinkhorn's iteration, to a mean change of 1e-4."""
    power_TX = logit_TX.exp()
    factor_X = torch.ones_like(power_TX[0])
    change = torch.inf
    while change > 1e-4:
        scaled_TX = power_TX / (power_TX @ factor_X)[:, None]
        before_X, factor_X = factor_X, 1 / (factor_X.numel() * scaled_TX.mean(dim=0))
        change = float((factor_X / before_X).log().abs().mean())
    return scaled_TX * factor_X


class Experts(nn.Module):
    """An MLP for each expert, on the tokens that chose it.

    ``fc1`` is [X, 2F, H], gate rows, then up rows ([X, F, H] without a gate); ``fc2`` [X, H, F].
    """

    def __init__(self, model: FieldSection) -> None:
        super().__init__()
        self.activation = Activation(model)
        width = model.moe_ffn_hidden_size or ffn_width(model)
        experts, hidden = model.num_moe_experts, model.hidden_size
        rows = self.activation.rows(width)
        self.fc1 = nn.Parameter(torch.empty(experts, rows, hidden))
        self.fc2 = nn.Parameter(torch.empty(experts, hidden, width))
        has_bias = model.add_bias_linear if model.add_expert_bias is None else model.add_expert_bias
        self.fc1_bias = nn.Parameter(torch.empty(experts, rows)) if has_bias else None
        self.fc2_bias = nn.Parameter(torch.empty(experts, hidden)) if has_bias else None
        self.adapter: ExpertAdapter | None = None

    def forward(self, x_CH: Tensor, count_X: Tensor, weight_C: Tensor) -> Tensor:
        """Compute the choices of all tokens, C = T * K, sorted by expert.

        Args:
            count_X: Number of choices of each expert.
            weight_C: How much a choice counts.
        """
        counts = count_X.tolist()
        outputs = []
        for expert, (x, weight) in enumerate(
            zip(x_CH.split(counts), weight_C.split(counts), strict=True)
        ):
            inner = x @ self.fc1[expert].t()
            if self.adapter is not None:
                inner = inner + self.adapter("experts_fc1", expert, x)
            if self.fc1_bias is not None:
                inner = inner + self.fc1_bias[expert]
            active = self.activation(inner)
            out = active @ self.fc2[expert].t()
            if self.adapter is not None:
                out = out + self.adapter("experts_fc2", expert, active)
            if self.fc2_bias is not None:
                out = out + self.fc2_bias[expert]
            outputs.append(weight[:, None] * out)
        return torch.cat(outputs)


class SharedExperts(MLP):
    """An MLP that every token goes through; a gate, if there is one, scales each token's output."""

    def __init__(self, model: FieldSection) -> None:
        super().__init__(model, model.moe_shared_expert_intermediate_size)
        has_gate = model.moe_shared_expert_gate
        self.gate_weight = nn.Parameter(torch.empty(1, model.hidden_size)) if has_gate else None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.gate_weight is None else out * (x @ self.gate_weight.t()).sigmoid()


class MoE(nn.Module):
    """The sum of each token's chosen experts, and of the shared experts."""

    bias = None
    """Nothing is left for the layer to add: experts add their biases themselves."""

    def __init__(self, model: FieldSection) -> None:
        super().__init__()
        self.router, self.experts = Router(model), Experts(model)
        has_shared = model.moe_shared_expert_intermediate_size is not None
        self.shared_experts = SharedExperts(model) if has_shared else None

    def forward(self, x_BSH: Tensor) -> Tensor:
        weight_TX, chosen_TX = self.router(x_BSH)
        x_TH = x_BSH.flatten(0, 1)
        expert_C, token_C = chosen_TX.t().nonzero().unbind(dim=1)
        out_CH = self.experts(x_TH[token_C], chosen_TX.sum(dim=0), weight_TX[token_C, expert_C])
        out_BSH = torch.zeros_like(x_TH).index_add(0, token_C, out_CH).view_as(x_BSH)
        return out_BSH if self.shared_experts is None else out_BSH + self.shared_experts(x_BSH)
