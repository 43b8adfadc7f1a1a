"""Self-attention on the attention contract: any kernel and wrappers, one autograd function."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from ascend_run.core.config.attention_needs import declared_by
from ascend_run.ops.autograd_function import Function
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import ConfigError, HookError
from ascend_run.plugin_api.layer_window import layer_window

from .assembly import Assembly
from .batch_mask import BatchMask
from .replicated_groups import own_heads
from .saved import flatten_saved

if TYPE_CHECKING:
    from megatron.core.transformer.enums import AttnMaskType

# S sequence on this rank, B micro-batch, N query heads, G key-value heads, D head size of q and k,
# E head size of v, H hidden size; head counts are per tensor-parallel rank


class _Attend(Function):
    """One kernel call. Saves for backward only what the kernel declares that it reads."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: c.AttentionKernel,
        spec: c.AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        out, lse, saved = kernel.forward(q, k, v, spec)
        named = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        kept = [tensor if name in kernel.backward_reads else None for name, tensor in named.items()]
        ctx.kernel, ctx.spec = kernel, spec
        ctx.has_bias = bias is not None and spec.bias_requires_grad
        ctx.has_sinks = sinks is not None
        record, ctx.rebuild = flatten_saved(saved)
        ctx.save_for_backward(*kept, *record)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *record = ctx.saved_tensors
        saved = ctx.rebuild(record)
        dq, dk, dv, *extras = ctx.kernel.backward(dout, q, k, v, out, lse, saved, ctx.spec)
        asked = ctx.has_bias + ctx.has_sinks
        if len(extras) != asked:
            raise HookError(
                f"the backward of {type(ctx.kernel).__name__} returns {3 + len(extras)} gradients, "
                f"expected {3 + asked}: of q, k and v, of the bias where bias_requires_grad says "
                "so, and of the sinks; see AttentionKernel.backward"
            )
        dbias = extras.pop(0) if ctx.has_bias else None
        dsinks = extras.pop(0) if ctx.has_sinks else None
        return None, None, dq, dk, dv, dbias, dsinks


def attend(
    kernel: c.AttentionKernel, q: Tensor, k: Tensor, v: Tensor, spec: c.AttentionSpec
) -> Tensor:
    """Return the attention output [S, B, N, E], differentiable in q, k, v, bias and sinks."""
    out: Tensor = _Attend.apply(kernel, spec, q, k, v, spec.bias, spec.sinks)
    return out


class CoreAttention(MegatronModule):
    """Megatron's core attention, computed by the run's attention kernel."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        assembly: Assembly,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.kernel = assembly.attention_kernel(layer_number - 1)
        self.tp_group = assembly.groups.tp
        self.dp_group = assembly.groups.dp
        self.dp_cp_group = getattr(assembly.groups, "dp_cp", None)
        assert config.kv_channels is not None  # set by Megatron's __post_init__
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        window = layer_window(assembly.model, layer_number - 1)
        self.mask = c.Mask(causal=True, window=window)
        self.softcap = assembly.model.attn_logit_softcapping
        self.position_bias = assembly.position_biases[layer_number - 1]
        self._add_sinks(config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: BatchMask | None = None,
    ) -> Tensor:
        """[S, B, N, D], [S, B, G, D], [S, B, G, E] -> [S, B, N * E].

        The mask refers to the full sequence; a context-parallel kernel knows this rank's shard of
        it.
        """
        assert attention_mask is None, "masks are objects here; see contracts.Mask and BatchMask"
        if packed_seq_params is not None and packed_seq_params.bias is not None:
            assert attention_bias is None, "two biases of one attention"
            attention_bias = packed_seq_params.bias
        spec = c.AttentionSpec(
            scale=self.scale,
            mask=self._mask(packed_seq_params),
            bias=attention_bias,
            bias_requires_grad=packed_seq_params is None or packed_seq_params.bias is None,
            position_bias=self.position_bias,
            sinks=self.softmax_offset,
            softcap=self.softcap,
            dropout=self._dropout(),
        )
        if packed_seq_params is not None and packed_seq_params.query_scale is not None:
            query = query * packed_seq_params.query_scale
        return attend(self.kernel, query, key, value, spec).flatten(2)

    def _add_sinks(self, config: TransformerConfig) -> None:
        """Add ``softmax_offset``, with Megatron's name and sharding.

        One logit per head: trained for ``learnable``, 0 for ``off-by-one``, None for ``vanilla``.
        """
        heads = config.num_attention_heads // self.tp_group.size()
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
        elif config.softmax_type == "off-by-one":
            zeros = torch.zeros(heads, dtype=config.params_dtype)
            self.register_buffer("softmax_offset", zeros, persistent=False)
        else:
            assert config.softmax_type == "learnable"
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """Return the trained sinks, sharded over heads."""
        found: dict[str, object] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=self.dp_cp_group,
        )
        return found

    def _mask(self, of_batch: BatchMask | None) -> c.Mask:
        if of_batch is None:
            return self.mask
        can, ends = declared_by(self.kernel), of_batch.document_ends
        if of_batch.bias is not None and not can.bias:
            raise ConfigError(
                f"the attention of this run ({type(self.kernel).__name__}) takes no bias, "
                "so it takes no attention_mask, which this batch has; leave the mask out"
            )
        if ends is not None and not can.documents:
            raise ConfigError(
                f"the attention of this run ({type(self.kernel).__name__}) cannot mask "
                "across documents, and this batch packs several in a sequence; do not pack them"
            )
        return attrs.evolve(self.mask, causal=of_batch.bias is None, document_ends=ends)

    def _dropout(self) -> c.Dropout | None:
        probability = self.config.attention_dropout
        if not self.training or probability == 0.0:
            return None
        # Drawn from torch's CPU generator, which recomputation restores. It is equal on all ranks
        # of a pipeline stage; they hold different heads or samples, so each derives a seed of its
        # own. A context-parallel kernel does the same for the shards of the sequence.
        seed = int(torch.randint(2**62, ()))
        for group in (self.tp_group, self.dp_group):
            seed = (seed * group.size() + group.rank()) % 2**62
        return c.Dropout(probability=probability, seed=seed)


def attend_and_project(
    layer: Attention, heads: tuple[Tensor, ...], bias: Tensor | None, of_batch: BatchMask | None
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's output and its bias for q, k and v; recompute the attention if chosen."""
    options = {"attention_bias": bias, "packed_seq_params": of_batch}
    q, k, v = heads
    if layer.checkpoint_core_attention and layer.training:
        out = layer._checkpointed_attention_forward(q, k, v, None, **options)
    else:  # Megatron's protocol names forward alone, and a cast would be in every call
        out = layer.core_attention(q, k, v, None, **options)  # type: ignore[operator]
    result: tuple[Tensor, Tensor | None] = layer.linear_proj(out)
    return result


class SelfAttention(MegatronSelfAttention):
    """Megatron's self-attention with its parameters and names; the forward is for training only.

    Megatron's forward branches on every call for inference, packing and fused kernels. This one
    splits q, k and v, applies the platform's rotary operator and attends.
    """

    def __init__(self, *args: Any, assembly: Assembly, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ops = assembly.ops
        self.has_window = layer_window(assembly.model, self.layer_number - 1) is not None
        # Megatron sets those of a whole key-value group where several ranks share one.
        self.num_attention_heads_per_partition = self.config.num_attention_heads // self.world_size

    def forward(  # type: ignore[override]  # Megatron's serves inference and packing too
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        inference_context: None = None,
        rotary_pos_emb: Tensor | None = None,
        *unused: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: BatchMask | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> ([S, B, H], bias).

        Args:
            rotary_pos_emb: Cosines and sines, [2, S, R], those of both kinds of layers, or None.
        """
        assert inference_context is None
        assert key_value_states is None
        if rotary_pos_emb is not None and rotary_pos_emb.dim() == 4:
            rotary_pos_emb = rotary_pos_emb[int(self.has_window)]
        mixed, _ = self.linear_qkv(hidden_states)  # type: ignore[operator]  # as core_attention
        mixed = own_heads(mixed, self.config, self.tp_group)
        heads = self._heads(mixed, rotary_pos_emb)
        return attend_and_project(self, heads, attention_bias, packed_seq_params)

    def _heads(self, mixed: Tensor, tables: Tensor | None) -> tuple[Tensor, ...]:
        """[S, B, G * (N/G + 2) * D] -> [S, B, N, D], [S, B, G, D], [S, B, G, D], with RoPE applied.

        Megatron's order: for each key-value group its queries, its key, its value.
        """
        groups = self.num_query_groups_per_partition
        queries = self.num_attention_heads_per_partition // groups
        width = self.hidden_size_per_attention_head
        interleaved = self.config.rotary_interleaved
        has_norms = self.q_layernorm is not None or self.k_layernorm is not None
        if tables is not None and self.ops.split_qkv_rotary is not None and not has_norms:
            cos, sin = tables.unbind(0)
            sizes = (groups, queries, width)
            return self.ops.split_qkv_rotary(mixed, cos, sin, sizes, interleaved)
        grouped = mixed.view(*mixed.shape[:2], groups, queries + 2, width)
        q, k, v = grouped.split((queries, 1, 1), dim=3)
        q, k, v = q.reshape(*mixed.shape[:2], groups * queries, width), k.squeeze(3), v.squeeze(3)
        if self.q_layernorm is not None:
            q = self.q_layernorm(q)
        if self.k_layernorm is not None:
            k = self.k_layernorm(k)
        if tables is not None:
            cos, sin = tables.unbind(0)
            q, k = (self.ops.rotary(x, cos, sin, interleaved) for x in (q, k))
        return q, k, v
