"""The numbers that every formula of the cost model is made of, read from a config once."""

from __future__ import annotations

import math
from typing import Any

import attrs

from ascend_run.core.config.latent_attention import head_widths
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.layout import Layout

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@attrs.frozen(kw_only=True)
class Sizes:
    """One rank's share of a model and of a micro-batch; the same for every rank of the run."""

    item_bytes: int
    """Of a parameter and of an activation."""
    hidden: int
    heads: int
    """Query heads of one tensor-parallel rank; so ``query_groups``, ``ffn`` and ``vocab``."""
    query_groups: int
    head_width: int
    """Of a query and a key."""
    value_width: int
    """Of a head of the values and of the output."""
    rotated_width: int
    """Of a head; with latent attention, that of the key that all heads share."""
    query_latent: int
    """Width of the latent that queries are made of, on every rank; 0 where there is none."""
    key_latent: int
    """The same of keys and values; 0 without latent attention."""
    ffn: int
    expert_ffn: int
    """Of one expert on one rank, divided by the expert tensor-parallel size."""
    expert_tp: int
    shared_ffn: int
    """Of the shared experts; 0 where there are none."""
    vocab: int
    """Rows with the padding."""
    valid_vocab: int
    """Rows that the loss reads, of the rank that has most."""
    experts: int
    """On this rank; 0 where the model has none."""
    all_experts: int
    topk: int
    gated: bool
    activation: str
    sequence: int
    """Tokens of a whole sequence."""
    tokens: int
    """Of a micro-batch, as the attention sees them before any exchange."""
    shared_tokens: int
    """Of a micro-batch between the parallel regions: ``tokens``, or with sequence parallelism this
    tensor-parallel rank's part of them."""
    micro_batch: int
    num_micro_batches: int

    @property
    def pair_width(self) -> float:
        """Half of what a key and a value of one head have together."""
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
        """Of all values of a token."""
        return self.query_groups * self.value_width

    @property
    def out_width(self) -> int:
        """Of what the attention answers for a token."""
        return self.heads * self.value_width

    @property
    def fc1_rows(self) -> int:
        """Rows of the first product for each column of the second."""
        return 2 if self.gated else 1

    @property
    def expert_tokens(self) -> int:
        """Copies of this rank's tokens that are sent to experts."""
        return self.shared_tokens * self.topk

    @property
    def expert_rows(self) -> int:
        """Rows that this rank's experts multiply, where the routing is balanced: those that come
        from the ranks that cut an expert between them are gathered."""
        return self.expert_tokens * self.expert_tp


def padded_vocab(vocab_size: int, multiple: int, tp_size: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks."""
    unit = multiple * tp_size
    return math.ceil(vocab_size / unit) * unit


def sizes_of(config: RunConfig, layout: Layout) -> Sizes:
    """The numbers of a run whose layout divides."""
    model, tp = config.model, layout.tp
    heads = model.num_attention_heads
    rows = padded_vocab(model.vocab_size, model.make_vocab_size_divisible_by, tp) // tp
    # Of a rank that holds the longest part, where a plugin cuts sequences unevenly.
    tokens = math.ceil(config.data.seq_length / layout.cp) * config.train.micro_batch_size
    ffn, widths = _ffn(model), head_widths(model)
    latent = bool(model.get("multi_latent_attention"))
    return Sizes(
        item_bytes=ITEM_BYTES[config.train.precision],
        hidden=model.hidden_size,
        heads=heads // tp,
        query_groups=max(1, (model.num_query_groups or heads) // tp),
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
        valid_vocab=min(rows, model.vocab_size),
        experts=(model.num_moe_experts or 0) // layout.ep,
        all_experts=model.num_moe_experts or 0,
        topk=model.moe_router_topk if model.num_moe_experts else 0,
        gated=bool(model.gated_linear_unit),
        activation=model.activation,
        sequence=config.data.seq_length,
        tokens=tokens,
        shared_tokens=tokens // tp if config.parallel.sequence_parallel else tokens,
        micro_batch=config.train.micro_batch_size,
        num_micro_batches=max(
            1, config.train.global_batch_size // (config.train.micro_batch_size * layout.dp)
        ),
    )


def _ffn(model: Any) -> int:
    """Megatron's default is four times the hidden size."""
    return int(model.ffn_hidden_size or 4 * model.hidden_size)
