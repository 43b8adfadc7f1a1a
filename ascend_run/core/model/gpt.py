"""Megatron's GPTModel with our rotary tables and our loss."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from ascend_run.plugin_api import contracts as c

from .assembly import Assembly
from .attention import BatchMask
from .rotary import RotaryTable

# S sequence on this rank, B micro-batch, H hidden size, V vocabulary on this rank


class GPT(GPTModel):
    """Decoder-only transformer; parameters and their names are Megatron's.

    Megatron's model leaves the loss to float32 and its rotary tables to one way of cutting the
    sequence. Here the loss kernel takes the hidden state (so that it need not hold all logits) and
    the tables follow the owner of the sequence's cut.

    Args:
        learns_positions: Whether there is an embedding for each position.
        valid_rows: How many of this rank's vocabulary rows are true tokens; the rows after them
            pad the vocabulary and take no probability.
    """

    def __init__(
        self,
        *,
        assembly: Assembly,
        rotary: RotaryTable | None,
        learns_positions: bool,
        valid_rows: int,
        **kwargs: Any,
    ) -> None:
        kind = "learned_absolute" if learns_positions else "none"
        super().__init__(position_embedding_type=kind, **kwargs)
        if self.pre_process and learns_positions:
            # Megatron's is float32 whatever the model, and would widen all that comes after it.
            self.embedding.position_embeddings.to(self.config.params_dtype)
        self.valid_rows = valid_rows
        self.layer_numbers = assembly.layer_numbers
        self.rotary = rotary
        self.loss = assembly.loss_kernel
        self.fuses_loss = not assembly.wraps_output_layer
        self.partition, self.cp_group = assembly.partition, assembly.groups.cp

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        document_ends: tuple[int, ...] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Token ids [B, S] -> on the last stage the masked loss sum (a scalar), or the logits
        [B, S, V] where there are no labels; on the others the hidden state [S, B, H].

        Any stage but the first reads the tokens' length only, and takes its hidden state from
        ``set_input_tensor``.

        Args:
            attention_mask: [B, S, S] bool over the whole sequence, True where a query (second
                axis) may attend to a key; None: causal. It stands in the place of the causal
                mask; a window and documents hide more. Here it is not Megatron's, which is True
                where it hides.
            document_ends: Where documents end in every sequence; no token sees another document.
                Position ids are the caller's. Rotary angles count on, since only differences
                within a document matter to them.
        """
        embedded = self.embedding(input_ids, position_ids) if self.pre_process else None
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=self._rotary_tables(input_ids, document_ends),
            packed_seq_params=BatchMask.of(document_ends, attention_mask, self.config.params_dtype),
            **kwargs,
        )
        if not self.post_process:
            return hidden
        if labels is None:
            return self._logits(hidden).transpose(0, 1).contiguous()
        assert loss_mask is not None
        if self.fuses_loss:
            return self.loss.from_hidden(
                self._whole_hidden(hidden), self._output_weight(), labels, loss_mask
            )
        return self.loss.from_logits(self._logits(hidden), labels, loss_mask)

    def _rotary_tables(
        self, input_ids: Tensor, document_ends: tuple[int, ...] | None
    ) -> Tensor | None:
        if self.rotary is None:
            return None
        rank, size = self.cp_group.rank(), self.cp_group.size()
        whole_length = c.whole_length(self.partition, input_ids.shape[1], rank, size)
        dtype, device = self.config.params_dtype, input_ids.device
        return self.rotary(whole_length, dtype, device, document_ends)

    def _tied_weight(self) -> Tensor | None:
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return None

    def _logits(self, hidden: Tensor) -> Tensor:
        logits, _ = self.output_layer(hidden, weight=self._tied_weight())
        return logits[..., : self.valid_rows]

    def _output_weight(self) -> Tensor:
        # Whoever gathers parameters while forward runs waits in hooks on the module that holds
        # them, and the loss takes this one's without calling it.
        for hook in self.output_layer._forward_pre_hooks.values():
            hook(self.output_layer, ())
        tied = self._tied_weight()
        weight = self.output_layer.weight if tied is None else tied
        return weight if self.valid_rows == weight.shape[0] else weight[: self.valid_rows]

    def _whole_hidden(self, hidden: Tensor) -> Tensor:
        """The hidden state as a column-parallel product needs it: whole on every tensor-parallel
        rank, with the ranks' partial gradients summed in backward."""
        group = self.pg_collection.tp
        if group.size() == 1:
            return hidden
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=group
            )
        return copy_to_tensor_model_parallel_region(hidden, group=group)
