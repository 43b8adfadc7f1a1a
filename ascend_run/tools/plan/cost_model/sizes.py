"""Sizes that the formulas of the cost model use, computed once from a config."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from ascend_run.core.config.latent_attention import head_widths
from ascend_run.core.config.vocabulary import padded_vocab_size
from ascend_run.ops.experts.capacity import dispatched_rows
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

if TYPE_CHECKING:
    from ascend_run.types.config import FieldSection

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@attrs.frozen(kw_only=True)
class Sizes:
    """Sizes of a model and of a micro-batch on one rank; the same for all ranks of the run."""

    item_bytes: int
    """Size of an element of a parameter or an activation. Unit: bytes."""
    stream_bytes: int
    """Size of an element of the hidden state between layers; 4 with ``fp32_residual_connection``.
    Unit: bytes."""
    hidden: int
    heads: int
    """Query heads of one tensor-parallel rank; likewise ``query_groups``, ``ffn`` and ``vocab``."""
    query_groups: int
    qkv_rows: int
    """Rows of the QKV projection on one rank; with fewer key-value groups than tensor-parallel
    ranks, a part of a group's."""
    head_width: int
    """Width of a head of queries and keys."""
    value_width: int
    """Width of a head of values and outputs."""
    rotated_width: int
    """Rotated width of a head; with latent attention, of the key shared by all heads."""
    query_latent: int
    """Unsharded width of the query latent; 0 if there is none."""
    key_latent: int
    """Unsharded width of the key-value latent; 0 without latent attention."""
    ffn: int
    expert_ffn: int
    """MLP width of one expert on one rank, divided by the expert tensor-parallel size."""
    expert_tp: int
    shared_ffn: int
    """MLP width of the shared experts; 0 if there are none."""
    vocab: int
    """Rows of the embedding, with padding."""
    valid_vocab: int
    """Rows without padding, on the rank with the most."""
    experts: int
    """Local experts; 0 if the model has none."""
    all_experts: int
    topk: int
    expert_tokens: int
    """Copies of this rank's tokens that are dispatched to experts, with balanced routing."""
    drops: bool
    """Experts drop tokens."""
    pads: bool
    """Every expert is padded to its capacity."""
    gated: bool
    activation: str
    glu_copies: int
    """Copies of the gate and of up that are saved because a clamp or an offset changes them."""
    sequence: int
    """Tokens of a full sequence."""
    tokens: int
    """Tokens of a micro-batch on this rank, inside of tensor-parallel regions."""
    shared_tokens: int
    """Tokens of a micro-batch outside of tensor-parallel regions: ``tokens``, or with sequence
    parallelism this tensor-parallel rank's shard of them."""
    micro_batch: int
    num_microbatches: int
    mtp_layers: range
    """Layers of multi-token prediction, numbered after the layer slots."""

    @property
    def pair_width(self) -> float:
        """Mean width of a key and a value of one head."""
        both = self.head_width + self.value_width
        return both / 2 if both % 2 else both // 2

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        return self.query_groups * self.head_width

    @property
    def values_width(self) -> int:
        """Width of all values of a token."""
        return self.query_groups * self.value_width

    @property
    def out_width(self) -> int:
        """Width of the attention output of a token."""
        return self.heads * self.value_width

    @property
    def fc1_rows(self) -> int:
        """Output width of fc1 relative to the input width of fc2: 2 if gated, else 1."""
        return 2 if self.gated else 1

    @property
    def expert_rows(self) -> int:
        """Rows that this rank's experts process with balanced routing, including those gathered
        for expert tensor parallelism."""
        return self.expert_tokens * self.expert_tp


def sizes_of(config: RunConfig, layout: Layout) -> Sizes:
    """Compute the sizes of a run with a valid layout."""
    model, tp = config.model, layout.tp
    heads = model.num_attention_heads
    groups = model.num_query_groups or heads
    rows = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, tp) // tp
    # For an uneven sequence partition, those of the rank with the longest shard.
    tokens = math.ceil(config.data.seq_length / layout.cp) * config.train.micro_batch_size
    ffn, widths = _ffn(model), head_widths(model)
    shared_tokens = tokens // tp if config.parallel.sequence_parallel else tokens
    latent = bool(model.multi_latent_attention)
    item_bytes = ITEM_BYTES[config.train.precision]
    return Sizes(
        item_bytes=item_bytes,
        stream_bytes=max(item_bytes, 4) if model.fp32_residual_connection else item_bytes,
        hidden=model.hidden_size,
        heads=heads // tp,
        query_groups=max(1, groups // tp),
        qkv_rows=((heads + groups) * widths.key + groups * widths.value) // tp,
        head_width=widths.key,
        value_width=widths.value,
        rotated_width=widths.rotated,
        query_latent=model.q_lora_rank or 0 if latent else 0,
        key_latent=model.kv_lora_rank if latent else 0,
        ffn=ffn // tp,
        expert_ffn=(model.moe_ffn_hidden_size or ffn) // layout.expt_tp,
        expert_tp=layout.expt_tp,
        shared_ffn=(model.moe_shared_expert_intermediate_size or 0) // tp,
        vocab=rows,
        valid_vocab=0 if model.num_labels else min(rows, model.vocab_size),
        experts=(model.num_moe_experts or 0) // layout.ep,
        all_experts=model.num_moe_experts or 0,
        topk=model.moe_router_topk if model.num_moe_experts else 0,
        drops=bool(model.num_moe_experts and model.moe_expert_capacity_factor),
        pads=bool(model.moe_pad_expert_input_to_capacity),
        expert_tokens=dispatched_rows(model, shared_tokens) if model.num_moe_experts else 0,
        gated=bool(model.gated_linear_unit),
        activation=model.activation,
        glu_copies=2 if model.activation_func_clamp_value else int(bool(model.glu_linear_offset)),
        sequence=config.data.seq_length,
        tokens=tokens,
        shared_tokens=shared_tokens,
        micro_batch=config.train.micro_batch_size,
        mtp_layers=range(model.num_layers, model.num_layers + (model.mtp_num_layers or 0)),
        num_microbatches=max(
            1, config.train.global_batch_size // (config.train.micro_batch_size * layout.dp)
        ),
    )


def _ffn(model: FieldSection) -> int:
    """Megatron's default is four times the hidden size."""
    return int(model.ffn_hidden_size or 4 * model.hidden_size)
