"""The MoE router: its parameters, and its losses in backward, in float32 or wider.

Megatron's own router always computes softmax in float32. For losses that are sums over tokens it
weights auxiliary losses by the tokens of one context-parallel rank, so that they shrink as ranks
are added. This router keeps float64 inputs in float64 and computes every auxiliary loss as a sum
over tokens; ``loss_scale`` makes it a mean, whatever the loss of the task is a mean over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import Router as MegatronRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ascend_run.core.config.built_in import router_problems
from ascend_run.ops.experts.balancing import balance_scores, balancing_loss, z_loss
from ascend_run.ops.experts.gating import wide_linear
from ascend_run.ops.experts.routing import largest, routing_scores, sparse_mixer
from ascend_run.ops.experts.routing_noise import evenly_selected, jittered
from ascend_run.ops.experts.sinkhorn import sinkhorn_bias
from ascend_run.ops.experts.token_dropping import token_dropping
from ascend_run.ops.tensor_marks import mark
from ascend_run.plugin_api.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

# S tokens of a sequence and T of all on this rank, B micro-batch, X experts of the full model


def _check_supported(config: TransformerConfig) -> None:
    """Check the config again, since ``ascend_configure`` may have changed it after planning."""
    if problems := list(router_problems(config)):
        raise ConfigError("the built-in router cannot do this", problems)


class Router(MegatronRouter):
    """Top-k router, for every ``moe_router_load_balancing_type`` but ``global_aux_loss``.

    With ``moe_router_enable_expert_bias`` Megatron adds ``moe_router_bias_update_rate`` to the bias
    of each expert below the mean load of a step, over all ranks, and subtracts it above.

    Args:
        has_bias: Whether the linear has a bias.
        sparsemixer_eps: Select experts by ``sparse_mixer`` with this threshold.
        samples: Draw its experts in training.

    Source: those of ``ops.experts``; expert bias, arXiv:2408.15664.

    Raises:
        ConfigError: An option is set that Megatron's router supports and this one does not.
    """

    expert_bias: Tensor | None
    """[X]."""
    local_tokens_per_expert: Tensor
    """Tokens of this step by expert: [X]."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        has_bias: bool = False,
        sparsemixer_eps: float | None = None,
        samples: bool = False,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        _check_supported(config)
        self.bias = None  # type: ignore[assignment]  # as Megatron's, by its one option for all
        if has_bias:
            bias_X = torch.empty(self.weight.shape[0], dtype=config.params_dtype)
            self.bias = nn.Parameter(bias_X)
            mark(self.bias, sequence_parallel=config.sequence_parallel)
        self.topk, self.sparsemixer_eps = config.moe_router_topk, sparsemixer_eps
        self.samples = samples
        self.dropping = token_dropping(
            self.topk,
            config.moe_expert_capacity_factor,
            config.moe_token_drop_policy,
            pads=config.moe_pad_expert_input_to_capacity,
        )
        groups, kept = config.moe_router_num_groups, config.moe_router_group_topk
        self.groups = (groups, kept) if groups and kept else None
        for name, is_saved in (("expert_bias", True), ("local_tokens_per_expert", False)):
            # Megatron's names, since it updates them; float32, since the updates are small.
            zeros_X = torch.zeros(self.weight.shape[0], dtype=torch.float32)
            moves = config.moe_router_enable_expert_bias
            self.register_buffer(name, zeros_X if moves else None, persistent=is_saved)
        self.aux_losses: Tensor | None = None
        self.loss_scale = torch.ones(())
        """Factor of its losses: what gradients are divided by, over the routed tokens of a step."""

    def gating(self, input: Tensor) -> Tensor:
        """Return logits in float32 or wider: float64 for float64 inputs or ``moe_router_dtype``."""
        wide = torch.promote_types(input.dtype, torch.float32)
        if self.config.moe_router_dtype == "fp64":
            wide = torch.float64
        return wide_linear(input, self.weight, self.bias, wide)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[S, B, H] -> weights [T, X] (0 if not selected) and the routing map [T, X]."""
        if padding_mask is not None:
            raise NotImplementedError("the built-in router cannot leave out padded tokens")
        if (eps := self.config.moe_input_jitter_eps) and self.training:
            wide = torch.promote_types(input.dtype, torch.float32)
            input = jittered(input.to(wide), eps, self._generator())
        return self.routing(self.gating(input))

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits_SBX = self._with_z_loss(logits)
        probs_TX, selected_TX = self._select(logits_SBX.flatten(0, 1))
        if self.config.moe_router_topk_scaling_factor:
            probs_TX = probs_TX * self.config.moe_router_topk_scaling_factor
        routing_map = selected_TX
        if self.dropping is not None:
            probs_TX, routing_map = self.dropping(probs_TX, selected_TX)
        if not self._takes_gradients():
            return probs_TX, routing_map
        if self.expert_bias is not None and self.weight.requires_grad:  # a frozen router keeps it
            with torch.no_grad():  # counts once, even if the layer is recomputed
                self.local_tokens_per_expert += selected_TX.sum(dim=0)
        return self._with_aux_loss(probs_TX, logits_SBX, selected_TX), routing_map

    def _select(self, logits_TX: Tensor) -> tuple[Tensor, Tensor]:
        if self.sparsemixer_eps is not None:
            generator = self._generator() if self.samples and self.training else None
            return sparse_mixer(logits_TX, self.topk, self.sparsemixer_eps, generator)
        chosen_TX = None
        if self.config.moe_router_force_load_balancing:
            chosen_TX = evenly_selected(logits_TX, self.topk)
        elif self.config.moe_router_load_balancing_type == "sinkhorn" and self.training:
            bias_X = sinkhorn_bias(logits_TX, self.tp_cp_group)
            chosen_TX = largest(logits_TX.detach() + bias_X, self.topk)
        return self._scores(logits_TX, self.expert_bias, chosen_TX)

    def _scores(
        self, logits_TX: Tensor, bias_X: Tensor | None, chosen_TX: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return routing_scores(
            logits_TX,
            self.topk,
            self.config.moe_router_score_function,
            self.config.moe_router_pre_softmax,
            groups=self.groups,
            bias_X=bias_X,
            chosen_TX=chosen_TX,
        )

    def _generator(self) -> torch.Generator:
        """Return a generator of this rank's own draws.

        Its seed is drawn from torch's CPU generator, which recomputation restores and which is
        equal on all ranks of a pipeline stage. All of them hold different tokens.
        """
        group = self.tp_dp_cp_group
        seed = (int(torch.randint(2**62, ())) * group.size() + group.rank()) % 2**62
        return torch.Generator(device=self.weight.device).manual_seed(seed)

    def _with_z_loss(self, logits: Tensor) -> Tensor:
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self._takes_gradients():
            return logits
        loss = z_loss(logits) * coefficient * self.loss_scale
        out: Tensor = MoEAuxLossAutoScaler.apply(logits, loss)
        return out

    def _with_aux_loss(self, probs_TX: Tensor, logits_SBX: Tensor, selected_TX: Tensor) -> Tensor:
        """Attach this rank's part of the balancing loss times the number of tokens."""
        kind, coefficient = (
            self.config.moe_router_load_balancing_type,
            self.config.moe_aux_loss_coeff,
        )
        if kind not in ("aux_loss", "seq_aux_loss") or not coefficient:
            return probs_TX
        assert not isinstance(coefficient, list)  # see router_problems
        forced = self.config.moe_router_force_load_balancing
        if self.expert_bias is not None and not forced:  # the scores are to be balanced
            selected_TX = self._scores(logits_SBX.detach().flatten(0, 1), None)[1]
        scores_SBX = balance_scores(logits_SBX, self.config.moe_router_score_function)
        loss, num_selections = balancing_loss(
            scores_SBX,
            selected_TX.view_as(scores_SBX),
            self.tp_cp_group,
            by_sequence=kind == "seq_aux_loss",
        )
        loss = loss * coefficient
        self._add_to_log(loss.detach() * self.topk / num_selections)
        out: Tensor = MoEAuxLossAutoScaler.apply(probs_TX, loss * self.loss_scale)
        return out

    def _takes_gradients(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def take_aux_losses(self) -> Tensor:
        """Return and reset this rank's sum and number of balancing losses, one per micro-batch.

        Shape: ``[2]``, float64.
        """
        losses, self.aux_losses = self.aux_losses, None
        if losses is None:
            return torch.zeros(2, dtype=torch.float64, device=self.weight.device)
        return losses

    def _add_to_log(self, aux_loss: Tensor) -> None:
        one = torch.stack((aux_loss.double(), torch.ones_like(aux_loss, dtype=torch.float64)))
        self.aux_losses = one if self.aux_losses is None else self.aux_losses + one
