"""Megatron's GPTModel with our rotary tables and loss."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from ascend_run.ops.attention.log_n_scale import log_n_scale
from ascend_run.ops.linear.cross_entropy import CrossEntropy, Reduction
from ascend_run.ops.linear.score_head import ScoreHead
from ascend_run.ops.transfer.later_tokens import later_tokens
from ascend_run.plugin_api import contracts as c

from .assembly import Assembly
from .batch_mask import BatchMask
from .rotary import RotaryTable, RotaryTables
from .spec import norm_spec

# S sequence on this rank, B micro-batch, H hidden size, V vocabulary on this rank


class GPT(GPTModel):
    """Decoder-only transformer with Megatron's parameters and names.

    Megatron's model computes the loss in float32 and supports one sequence sharding for its rotary
    tables. Here the loss takes the hidden state, so it need not hold all logits, and the tables
    follow the run's sequence partition.

    Args:
        learns_positions: Whether there is a learned position embedding.
        valid_rows: Number of this rank's vocabulary rows that are real tokens; the rows after them
            are padding and get no probability.
    """

    def __init__(
        self,
        *,
        assembly: Assembly,
        rotary: RotaryTable | RotaryTables | None,
        learns_positions: bool,
        valid_rows: int,
        **kwargs: Any,
    ) -> None:
        kind: Literal["learned_absolute", "none"] = (
            "learned_absolute" if learns_positions else "none"
        )
        super().__init__(position_embedding_type=kind, **kwargs)
        if hasattr(self, "embedding") and learns_positions:
            # Megatron's is always float32 and would widen all later activations.
            self.embedding.position_embeddings.to(self.config.params_dtype)
        if hasattr(self, "embedding") and assembly.model.embedding_layernorm:
            self.embedding.layernorm = build_module(
                norm_spec(assembly),
                config=self.config,
                hidden_size=self.config.hidden_size,
                eps=self.config.layernorm_epsilon,
            )
        self.score: ScoreHead | None = None
        if self.post_process and (num_labels := assembly.model.num_labels):
            del self.output_layer
            dtype = self.config.params_dtype
            self.score = ScoreHead(self.config.hidden_size, num_labels, dtype)
        elif self.post_process and assembly.model.add_output_bias:
            size = self.output_layer.output_size_per_partition
            bias_V = nn.Parameter(torch.empty(size, dtype=self.config.params_dtype))
            set_tensor_model_parallel_attributes(bias_V, True, 0, 1)
            self.output_layer.bias = bias_V
        self.valid_rows = valid_rows
        self.layer_numbers = assembly.layer_numbers
        self.rotary = rotary
        model = assembly.model
        self.softcap = model.final_logit_softcapping
        self.loss = CrossEntropy(
            assembly.groups.tp, assembly.ops.matmul, self.softcap, assembly.loss_chunk_bytes
        )
        self.logits_scaling = model.logits_scaling
        self.normalizes_rows = model.normalize_output_rows
        of_width = math.sqrt(model.hidden_size) if model.scale_embedding else 1.0
        self.embedding_multiplier: float = of_width * model.embedding_multiplier
        self.log_n_length = model.log_n_scaling_length
        self.log_n_in_training = model.log_n_scaling_in_training
        self.fuses_loss = not assembly.wraps_output_layer
        self.partition, self.cp_group = assembly.partition, assembly.groups.cp
        self.mtp_losses: Tensor | None = None

    def setup_embeddings_and_output_layer(self) -> None:
        """Share the embedding between stages; tied, a last stage that embeds holds it once."""
        if self.mtp_process and self.share_embeddings_and_output_weights:
            self.output_layer.weight = None  # type: ignore[assignment]  # as Megatron skips it
        super().setup_embeddings_and_output_layer()

    def sharded_state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return what Megatron's does, which expects an output layer on the last stage."""
        ends = self.post_process
        self.post_process = hasattr(self, "output_layer")
        try:
            return super().sharded_state_dict(*arguments, **options)
        finally:
            self.post_process = ends

    def forward(  # type: ignore[override]  # Megatron's serves inference and multi-token heads too
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        document_ends: tuple[int, ...] | None = None,
        reduction: Reduction = "sum",
        **kwargs: Any,
    ) -> Tensor:
        """Token ids [B, S] -> loss, logits, scores, or hidden state.

        The last stage returns the loss, or the logits [B, S, V] without labels; with a score head,
        the scores [P, K] where ``loss_mask`` is above 0, as ``ScoreHead`` orders them. Other
        stages return the hidden state [S, B, H]. Stages other than the first read only the length
        of the tokens and take their hidden state from ``set_input_tensor``.

        Args:
            attention_mask: [B, S, S] bool over the full sequence, True where a query (second axis)
                may attend to a key; None is causal. Replaces the causal mask; a window and
                documents mask more. Megatron's masks are inverted: True where masked.
            document_ends: Where documents end in every sequence; tokens do not attend to other
                documents. The caller provides position ids. RoPE positions are not reset, since
                only differences within a document matter.
            reduction: ``sum`` is the masked loss sum, a scalar; ``none`` every token's loss [B, S],
                0 where the mask is 0, and no multi-token prediction.
            kwargs: ``rotary_pos_emb`` replaces the tables of consecutive positions from 0.
        """
        embedded = self._embedded(input_ids, position_ids) if self.pre_process else None
        of_layers = {
            "attention_mask": None,
            "packed_seq_params": BatchMask.of(
                document_ends,
                attention_mask,
                self._query_scale(position_ids),
                self.config.params_dtype,
            ),
            **kwargs,
        }
        if "rotary_pos_emb" not in kwargs:
            of_layers["rotary_pos_emb"] = self._rotary_tables(input_ids, document_ends)
        hidden = self.decoder(hidden_states=embedded, **of_layers)
        if not self.post_process:
            out: Tensor = hidden
            return out
        if self.score is not None:
            scores: Tensor = self.score(self._gathered_hidden(hidden, sums=False), loss_mask)
            return scores
        if labels is None:
            return self._logits(hidden).transpose(0, 1).contiguous()
        assert loss_mask is not None
        loss = self._loss(hidden, labels, loss_mask, reduction)
        if not self.mtp_process or not self.training or reduction == "none":
            return loss
        fields = {"input_ids": input_ids, "labels": labels, "loss_mask": loss_mask}
        if position_ids is not None:
            fields["position_ids"] = position_ids
        return loss + self._mtp_gradient(hidden, fields, document_ends, of_layers)

    def _loss(
        self, hidden: Tensor, labels: Tensor, loss_mask: Tensor, reduction: Reduction = "sum"
    ) -> Tensor:
        if self.fuses_loss:
            bias_V = self.output_layer.bias
            return self.loss.from_hidden(
                self._gathered_hidden(self._scaled(hidden)),
                self._output_weight(),
                labels,
                loss_mask,
                bias_V=None if bias_V is None else bias_V[: self.valid_rows],
                reduction=reduction,
            )
        return self.loss.from_logits(self._logits(hidden), labels, loss_mask, reduction=reduction)

    def _mtp_gradient(
        self,
        hidden: Tensor,
        fields: dict[str, Tensor],
        document_ends: tuple[int, ...] | None,
        of_layers: dict[str, Any],
    ) -> Tensor:
        """Return 0 with the gradient of ``factor / depths * sum of every depth's loss sum``.

        The loss of the run stays that of the next token. The one division by the number of its
        tokens yields the mean over T of arXiv:2412.19437, equations 24 and 25.
        """
        depths = len(self.mtp.layers)
        shifted = later_tokens(fields, depths, document_ends, self.partition, self.cp_group)
        losses, counts = [], []
        for layer, batch in zip(self.mtp.layers, shifted, strict=True):
            hidden, _, _ = layer(
                input_ids=batch["input_ids"],
                position_ids=batch.get("position_ids"),
                hidden_states=hidden,
                embedding=self._embedded,
                **of_layers,
            )
            losses.append(self._loss(hidden, batch["labels"], batch["loss_mask"]))
            counts.append(batch["loss_mask"].count_nonzero())
        read = torch.stack((torch.stack(losses).detach().double(), torch.stack(counts).double()), 1)
        self.mtp_losses = read if self.mtp_losses is None else self.mtp_losses + read
        factor = self.config.mtp_loss_scaling_factor or 0.0
        total: Tensor = torch.stack(losses).sum() * (factor / depths)
        return total - total.detach()

    def take_mtp_losses(self) -> Tensor | None:
        """Return and reset loss sum and token count of every depth, [depths, 2], float64.

        None if this chunk predicts nothing, or no training step came between.
        """
        losses, self.mtp_losses = self.mtp_losses, None
        return losses

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self.logits_scaling == 1.0 else hidden / self.logits_scaling

    def _embedded(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        embedded: Tensor = self.embedding(input_ids, position_ids)
        if (norm := getattr(self.embedding, "layernorm", None)) is not None:
            embedded = norm(embedded)
        if self.embedding_multiplier == 1.0:
            return embedded
        return embedded * self.embedding_multiplier

    def _query_scale(self, position_ids: Tensor | None) -> Tensor | None:
        if self.log_n_length is None or (self.training and not self.log_n_in_training):
            return None
        return log_n_scale(position_ids, self.log_n_length, self.config.params_dtype)

    def _rotary_tables(
        self, input_ids: Tensor, document_ends: tuple[int, ...] | None
    ) -> Tensor | None:
        if self.rotary is None:
            return None
        rank, size = self.cp_group.rank(), self.cp_group.size()
        full_length = c.full_length(self.partition, input_ids.shape[1], rank, size)
        dtype, device = self.config.params_dtype, input_ids.device
        result: Tensor | None = self.rotary(full_length, dtype, device, document_ends)
        return result

    def _other_weight(self) -> Tensor | None:
        """Return what replaces the output layer's own weight, or None."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        if not self.normalizes_rows:
            return weight
        return F.normalize(self.output_layer.weight if weight is None else weight, dim=-1)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.normalizes_rows:
            self._wait_for_output_weight()
        logits, _ = self.output_layer(self._scaled(hidden), weight=self._other_weight())
        out: Tensor = logits[..., : self.valid_rows]
        if self.softcap is not None:
            out = torch.tanh(out / self.softcap) * self.softcap
        return out

    def _output_weight(self) -> Tensor:
        self._wait_for_output_weight()
        other = self._other_weight()
        weight = self.output_layer.weight if other is None else other
        return weight if self.valid_rows == weight.shape[0] else weight[: self.valid_rows]

    def _wait_for_output_weight(self) -> None:
        # An all-gather of parameters during forward is waited for in a pre-forward hook of their
        # module. The weight is read here without calling the module, so run its hooks.
        for hook in self.output_layer._forward_pre_hooks.values():
            hook(self.output_layer, ())

    def _gathered_hidden(self, hidden: Tensor, *, sums: bool = True) -> Tensor:
        """Return the hidden state, full on every tensor-parallel rank.

        Args:
            sums: Sum the ranks' gradients in backward, as a column-parallel linear needs it; else
                they are equal.
        """
        group = self.pg_collection.tp
        if group.size() == 1 or not (sums or self.config.sequence_parallel):
            return hidden
        if self.config.sequence_parallel:
            gathered: Tensor = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=sums, group=group
            )
            return gathered
        out: Tensor = copy_to_tensor_model_parallel_region(hidden, group=group)
        return out
