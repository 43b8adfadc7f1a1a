"""Self-attention on the attention contract: any kernel, any wrapper, one autograd function."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from ascend_run.core.config.attention_needs import declared_by
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import ConfigError, HookError

from .assembly import Assembly

# S sequence on this rank, B micro-batch, N query heads, G key-value heads, D width of q and k,
# E width of v, H hidden size; heads are this tensor-parallel rank's


class _Attend(torch.autograd.Function):
    """One kernel call; keeps for backward just what the kernel says it reads."""

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
        ctx.save_for_backward(*kept, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *saved = ctx.saved_tensors
        dq, dk, dv, *extras = ctx.kernel.backward(dout, q, k, v, out, lse, tuple(saved), ctx.spec)
        asked = ctx.has_bias + ctx.has_sinks
        if len(extras) != asked:
            raise HookError(
                f"the backward of {type(ctx.kernel).__name__} answers {3 + len(extras)} gradients, "
                f"expected {3 + asked}: of q, k and v, of the bias where bias_requires_grad says "
                "so, and of the sinks; see AttentionKernel.backward"
            )
        dbias = extras.pop(0) if ctx.has_bias else None
        dsinks = extras.pop(0) if ctx.has_sinks else None
        return None, None, dq, dk, dv, dbias, dsinks


def attend(
    kernel: c.AttentionKernel, q: Tensor, k: Tensor, v: Tensor, spec: c.AttentionSpec
) -> Tensor:
    """Attention output [S, B, N, E], differentiable in q, k, v and the spec's bias and sinks."""
    return _Attend.apply(kernel, spec, q, k, v, spec.bias, spec.sinks)


@attrs.frozen(kw_only=True)
class BatchMask:
    """What a micro-batch lets be seen, beside the layer's own mask; it goes through Megatron's
    layers in the place of its ``packed_seq_params``."""

    document_ends: tuple[int, ...] | None = None
    """Where the documents of every sequence end."""
    bias: Tensor | None = None
    """[B, 1, S, S] over the whole sequence, 0 where a query sees a key and -inf elsewhere; it
    stands in the place of the causal mask."""

    @classmethod
    def of(
        cls, document_ends: tuple[int, ...] | None, allowed_BSS: Tensor | None, dtype: torch.dtype
    ) -> BatchMask | None:
        """None where there is neither."""
        if document_ends is None and allowed_BSS is None:
            return None
        bias = None
        if allowed_BSS is not None:
            hidden = allowed_BSS.logical_not().unsqueeze(1)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            bias.masked_fill_(hidden, -torch.inf)
        return cls(document_ends=document_ends, bias=bias)


class CoreAttention(MegatronModule):
    """Megatron's core attention: heads in, heads out, by the run's attention kernel."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        assembly: Assembly,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.kernel = assembly.attention_kernel(layer_number - 1)
        self.tp_group = assembly.groups.tp
        self.dp_cp_group = getattr(assembly.groups, "dp_cp", None)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        window = getattr(config, "window_size", None)
        self.mask = c.Mask(causal=True, window=tuple(window) if window else None)
        self.softcap = assembly.softcap
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
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: BatchMask | None = None,
    ) -> Tensor:
        """[S, B, N, D], [S, B, G, D], [S, B, G, E] -> [S, B, N * E].

        The mask speaks of the whole sequence; a kernel that exchanges the sequence knows which
        part of it this rank holds.
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
        return attend(self.kernel, query, key, value, spec).flatten(2)

    def _add_sinks(self, config: TransformerConfig) -> None:
        """``softmax_offset``, as Megatron names and cuts it: one logit a head, trained, or 0 with
        ``off-by-one``; None with ``vanilla``."""
        heads = config.num_attention_heads // self.tp_group.size()
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
        elif config.softmax_type == "off-by-one":
            zeros = torch.zeros(heads, dtype=config.params_dtype)
            self.register_buffer("softmax_offset", zeros, persistent=False)
        else:
            assert config.softmax_type == "learnable"
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The trained sinks, cut along their heads."""
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
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
                f"the attention of this run ({type(self.kernel).__name__}) takes no bias, and so "
                "no attention_mask, which this batch has; leave the mask out"
            )
        if ends is not None and not can.documents:
            raise ConfigError(
                f"the attention of this run ({type(self.kernel).__name__}) keeps no documents "
                "apart, and this batch has several in a sequence; do not pack them"
            )
        return attrs.evolve(self.mask, causal=of_batch.bias is None, document_ends=ends)

    def _dropout(self) -> c.Dropout | None:
        probability = self.config.attention_dropout
        if not self.training or probability == 0.0:
            return None
        # From torch's CPU generator, which recomputation restores, and which is the same on the
        # tensor-parallel ranks: they hold different heads, so each takes a seed of its own.
        drawn = int(torch.randint(2**62, ()))
        seed = (drawn * self.tp_group.size() + self.tp_group.rank()) % 2**62
        return c.Dropout(probability=probability, seed=seed)


class SelfAttention(MegatronSelfAttention):
    """Megatron's self-attention, its parameters and names, with a forward for training only.

    Megatron's own forward serves inference, packing and fused kernels by branches on every call;
    this one splits, rotates by the platform's operator and attends.
    """

    def __init__(self, *args: Any, assembly: Assembly, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ops = assembly.ops

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        *unused: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: BatchMask | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> ([S, B, H], bias).

        Args:
            rotary_pos_emb: [2, S, R], cosines and sines, or None.
        """
        assert inference_context is None
        assert key_value_states is None
        mixed, _ = self.linear_qkv(hidden_states)
        q, k, v = self._heads(mixed, rotary_pos_emb)
        options = {"attention_bias": attention_bias, "packed_seq_params": packed_seq_params}
        if self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(q, k, v, None, **options)
        else:
            out = self.core_attention(q, k, v, None, **options)
        return self.linear_proj(out)

    def _heads(self, mixed: Tensor, tables: Tensor | None) -> tuple[Tensor, ...]:
        """[S, B, G * (N/G + 2) * D] -> [S, B, N, D], [S, B, G, D], [S, B, G, D], rotated.

        Megatron's order: for each key-value group its queries, its key, its value.
        """
        groups = self.num_query_groups_per_partition
        queries = self.num_attention_heads_per_partition // groups
        width = self.hidden_size_per_attention_head
        interleaved = self.config.rotary_interleaved
        has_norms = self.q_layernorm is not None or self.k_layernorm is not None
        if tables is not None and self.ops.split_qkv_rotary is not None and not has_norms:
            sizes = (groups, queries, width)
            return self.ops.split_qkv_rotary(mixed, *tables.unbind(0), sizes, interleaved)
        grouped = mixed.view(*mixed.shape[:2], groups, queries + 2, width)
        q, k, v = grouped.split((queries, 1, 1), dim=3)
        q, k, v = q.reshape(*mixed.shape[:2], groups * queries, width), k.squeeze(3), v.squeeze(3)
        if self.q_layernorm is not None:
            q = self.q_layernorm(q)
        if self.k_layernorm is not None:
            k = self.k_layernorm(k)
        if tables is not None:
            q, k = (self.ops.rotary(x, *tables.unbind(0), interleaved) for x in (q, k))
        return q, k, v
