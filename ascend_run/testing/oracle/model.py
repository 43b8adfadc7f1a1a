"""The transformer, its loss, and multi-token prediction.

Sources: arXiv:1706.03762; norms before sublayers, arXiv:2002.04745, after and around them,
arXiv:2408.00118; multipliers, arXiv:2203.03466; tied embeddings, arXiv:1608.05859; multi-token
prediction, arXiv:2412.19437, section 2.2.
"""

# shapes: see the package

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_run.types.config import FieldSection, RunConfig

from .adapters import add_adapters, freeze_all_but_adapters
from .attention import SelfAttention
from .batches import MicroBatch, later
from .experts import MoE, Router
from .latent import LatentAttention
from .layers import MLP, Linear, Norm, ffn_width, plus_bias


class Residual(nn.Module):
    """``x + multiplier * norm(update + bias)``, with the norm only if it is placed there."""

    def __init__(self, model: FieldSection) -> None:
        super().__init__()
        self.multiplier = model.residual_multiplier
        has_norm = model.norm_placement in ("post", "both")
        self.norm = Norm(model, model.hidden_size) if has_norm else nn.Identity()

    def forward(self, x: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = x + self.multiplier * self.norm(plus_bias(update, bias))
        return out


class Layer(nn.Module):
    """Attention, then an MLP or experts, each added to the residual stream.

    Args:
        slot: Layer slot in the whole model, from 0.
    """

    def __init__(self, config: RunConfig, slot: int, *, has_experts: bool) -> None:
        super().__init__()
        model = config.model
        self.input_layernorm, self.pre_mlp_layernorm = _norm_before(model), _norm_before(model)
        attention = LatentAttention if model.multi_latent_attention else SelfAttention
        self.self_attention = attention(config, slot)
        self.mlp = MoE(model) if has_experts else MLP(model, ffn_width(model))
        self.self_attn_bda, self.mlp_bda = Residual(model), Residual(model)

    def forward(self, x_BSH: Tensor, batch: MicroBatch) -> Tensor:
        attention, mlp = self.self_attention, self.mlp
        update = attention(self.input_layernorm(x_BSH), batch)
        x_BSH = self.self_attn_bda(x_BSH, update, attention.bias)
        out: Tensor = self.mlp_bda(x_BSH, mlp(self.pre_mlp_layernorm(x_BSH)), mlp.bias)
        return out


def _norm_before(model: FieldSection) -> nn.Module:
    has_norm = model.norm_placement in ("pre", "both")
    return Norm(model, model.hidden_size) if has_norm else nn.Identity()


def filled_slots(config: RunConfig) -> list[int]:
    """Return the layer slots that are not left empty; layers are numbered without the others."""
    has_empty = "noop-layers" in config.enable
    empty = config.plugins["noop-layers"].layers if has_empty else ()
    return [slot for slot in range(config.model.num_layers) if slot not in empty]


def _has_experts(model: FieldSection, slot: int) -> bool:
    """Every ``moe_layer_freq``-th layer has experts, the first included; or a flag for each."""
    if not model.num_moe_experts:
        return False
    every = model.moe_layer_freq
    return bool(slot % every == 0 if isinstance(every, int) else every[slot])


class Decoder(nn.Module):
    """The layers, and the norm after the last one."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        slots = filled_slots(config)
        self.layers = nn.ModuleList(
            Layer(config, slot, has_experts=_has_experts(config.model, slot)) for slot in slots
        )
        add_adapters(self.layers, config)
        self.final_layernorm = Norm(config.model, config.model.hidden_size)

    def forward(self, x_BSH: Tensor, batch: MicroBatch) -> Tensor:
        for layer in self.layers:
            x_BSH = layer(x_BSH, batch)
        out: Tensor = self.final_layernorm(x_BSH)
        return out


class Table(nn.Module):
    """An embedding: row i for id i."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, id_BS: Tensor) -> Tensor:
        return self.weight[id_BS]


class Embedding(nn.Module):
    """The embedding of tokens, plus that of positions if they are learned.

    A norm of its output, ``layernorm``, and its multipliers are applied outside, as in a run.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        model, self.position_embeddings = config.model, None
        self.word_embeddings = Table(model.vocab_size, model.hidden_size)
        if model.position_embedding_type == "learned_absolute":
            longest = model.max_position_embeddings or config.data.seq_length
            self.position_embeddings = Table(longest, model.hidden_size)
        if model.embedding_layernorm:
            self.layernorm = Norm(model, model.hidden_size)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        x_BSH: Tensor = self.word_embeddings(tokens_BS)
        if self.position_embeddings is not None:
            x_BSH = x_BSH + self.position_embeddings(positions_BS)
        return x_BSH


class OutputLayer(nn.Module):
    """The weight of the logits, unless it is the embedding's, and their bias, if there is one."""

    def __init__(self, model: FieldSection) -> None:
        super().__init__()
        rows, hidden = model.vocab_size, model.hidden_size
        is_tied = model.share_embeddings_and_output_weights
        self.weight = None if is_tied else nn.Parameter(torch.empty(rows, hidden))
        self.bias = nn.Parameter(torch.empty(rows)) if model.add_output_bias else None


class PredictedToken(nn.Module):
    """One depth of multi-token prediction: a layer on the hidden state of the depth before, and the
    embedding of the token that it predicted."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        model, hidden = config.model, config.model.hidden_size
        self.enorm, self.hnorm = Norm(model, hidden), Norm(model, hidden)
        self.eh_proj = Linear(2 * hidden, hidden)
        has_experts = _has_experts(model, filled_slots(config)[-1])
        self.transformer_layer = Layer(config, model.num_layers, has_experts=has_experts)
        self.final_layernorm = Norm(model, hidden)

    def forward(self, embedded_BSH: Tensor, hidden_BSH: Tensor, batch: MicroBatch) -> Tensor:
        both = torch.cat((self.enorm(embedded_BSH), self.hnorm(hidden_BSH)), dim=-1)
        out: Tensor = self.final_layernorm(self.transformer_layer(self.eh_proj(both), batch))
        return out


class PredictedTokens(nn.Module):
    """The depths of multi-token prediction."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        depths = config.model.mtp_num_layers or 0
        self.layers = nn.ModuleList(PredictedToken(config) for _ in range(depths))


class GPT(nn.Module):
    """Token ids to the sum of the next tokens' losses.

    Parameters are float64 and without values; load them from a run.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        model = self.model = config.model
        self.embedding, self.decoder = Embedding(config), Decoder(config)
        self.output_layer = OutputLayer(model)
        if model.mtp_num_layers:
            self.mtp = PredictedTokens(config)
        self.double()
        freeze_all_but_adapters(self, config)

    def forward(self, batch: MicroBatch, router_scale: float) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of trained tokens, and what gradients are taken of.

        The latter adds the losses of routers and of multi-token prediction.

        Args:
            router_scale: Trained tokens of the global batch over all its tokens: the losses of
                routers are means over the latter.
        """
        hidden_BSH = self.decoder(self._embedded(batch.tokens_BS, batch.positions_BS), batch)
        loss = self._loss(hidden_BSH, batch.labels_BS, batch.loss_mask_BS)
        objective = loss + self._later_losses(hidden_BSH, batch)
        for router in self.routers():
            objective = objective + router.loss * router_scale
        return loss, objective

    def routers(self) -> Iterator[Router]:
        """Yield the router of each layer with experts."""
        for module in self.modules():
            if isinstance(module, Router):
                yield module

    def _embedded(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        model = self.model
        x_BSH: Tensor = self.embedding(tokens_BS, positions_BS)
        if model.embedding_layernorm:
            x_BSH = self.embedding.layernorm(x_BSH)
        of_width = math.sqrt(model.hidden_size) if model.scale_embedding else 1.0
        out: Tensor = x_BSH * (of_width * model.embedding_multiplier)
        return out

    def _loss(self, hidden_BSH: Tensor, labels_BS: Tensor, mask_BS: Tensor) -> Tensor:
        """Return ``sum(mask * -log softmax(logits)[label])``."""
        model = self.model
        weight_VH = self.output_layer.weight
        if weight_VH is None:
            weight_VH = self.embedding.word_embeddings.weight
        if model.normalize_output_rows:
            weight_VH = weight_VH / weight_VH.norm(dim=-1, keepdim=True)
        product_BSV = hidden_BSH @ weight_VH.t() / model.logits_scaling
        logit_BSV = plus_bias(product_BSV, self.output_layer.bias)
        if (cap := model.final_logit_softcapping) is not None:
            logit_BSV = cap * torch.tanh(logit_BSV / cap)
        nll = F.cross_entropy(logit_BSV.flatten(0, 1), labels_BS.flatten(), reduction="none")
        return (mask_BS.flatten() * nll).sum()

    def _later_losses(self, hidden_BSH: Tensor, batch: MicroBatch) -> Tensor:
        """Return ``factor / depths`` times the sum of the losses of the tokens after the next."""
        depths, total = self.model.mtp_num_layers or 0, hidden_BSH.new_zeros(())
        for depth in range(1, depths + 1):
            tokens, positions, labels, mask = (
                later(x_BS, depth, batch)
                for x_BS in (
                    batch.tokens_BS,
                    batch.positions_BS,
                    batch.labels_BS,
                    batch.loss_mask_BS,
                )
            )
            embedded = self._embedded(tokens, positions)
            hidden_BSH = self.mtp.layers[depth - 1](embedded, hidden_BSH, batch)
            total = total + self._loss(hidden_BSH, labels, mask)
        return total * ((self.model.mtp_loss_scaling_factor or 0.0) / max(depths, 1))
