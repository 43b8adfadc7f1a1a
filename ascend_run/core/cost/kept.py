"""What the plain model's layers keep from forward to backward, tensor by tensor.

Taken from the modules of ``core.model`` and Megatron's around them: what each autograd node saves,
each storage once. The attention is that of a fused kernel, which keeps q, k, v, its output and the
log-sum-exp. Routing is taken to be balanced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import KeptTensor
from ascend_run.plugin_api.layout import Layout

from .sizes import Sizes

_WIDE = 4
_INDEX = 8
"""Bytes of float32 and of int64."""


def layer_kept(
    config: RunConfig, layout: Layout, sizes: Sizes, *, moe: bool
) -> tuple[KeptTensor, ...]:
    """Of one layer and one micro-batch, in the order of the forward."""
    parts: dict[str, Iterable[tuple[str, float]]] = {
        "input_norm": _norm(config, sizes),
        "self_attention": _attention(config, layout, sizes),
        "mlp_norm": _norm(config, sizes),
    }
    if moe:
        parts |= {
            "router": _router(sizes),
            "dispatcher": _dispatcher(config, layout, sizes),
            "experts": _experts(config, sizes),
        }
        if sizes.shared_ffn:
            parts["shared_experts"] = _feed_forward(sizes, sizes.shared_ffn)
    else:
        parts["mlp"] = (*_feed_forward(sizes, sizes.ffn), ("dropped", _dropped(config, sizes)))
    return tuple(
        KeptTensor(part=part, name=name, nbytes=nbytes)
        for part, tensors in parts.items()
        for name, nbytes in tensors
        if nbytes
    )


def gathered_tokens(config: RunConfig, layout: Layout, sizes: Sizes) -> int:
    """Tokens of all ranks that share experts, where the dispatcher gathers them; else 0."""
    ranks = layout.ep * layout.expt_tp
    gathers = config.model.moe_token_dispatcher_type == "allgather"
    return ranks * sizes.shared_tokens if gathers and ranks > 1 else 0


def gather_buffer(config: RunConfig, layout: Layout, sizes: Sizes, *, moe: bool) -> float:
    """Megatron's one buffer that hidden states are gathered into, the largest of them. It stays."""
    tokens = gathered_tokens(config, layout, sizes) if moe else 0
    if layout.tp > 1 and config.parallel.sequence_parallel:
        tokens = max(tokens, sizes.tokens)
    return tokens * sizes.hidden * sizes.item_bytes


def _dropped(config: RunConfig, sizes: Sizes) -> float:
    """The factors by which a half of a layer was multiplied before it was added."""
    return hidden_bytes(sizes) if config.model.hidden_dropout else 0.0


def hidden_bytes(sizes: Sizes) -> float:
    """One hidden state between the parallel regions."""
    return sizes.shared_tokens * sizes.hidden * sizes.item_bytes


def _norm(config: RunConfig, sizes: Sizes) -> Iterator[tuple[str, float]]:
    yield "input", hidden_bytes(sizes)
    statistics = 2 if config.model.normalization == "LayerNorm" else 1
    yield "statistics", sizes.shared_tokens * _WIDE * statistics


def _attention(config: RunConfig, layout: Layout, sizes: Sizes) -> Iterator[tuple[str, float]]:
    model, item = config.model, sizes.tokens * sizes.item_bytes
    query, key = sizes.query_width * item, sizes.key_width * item
    yield "input", hidden_bytes(sizes)
    if sizes.key_latent:
        yield from _latents(config, layout, sizes)
        return
    rotated = model.position_embedding_type == "rope"
    shared = sizes.heads != sizes.query_groups
    if rotated and not model.qk_layernorm:  # split and rotated into tensors of their own
        yield from (("q", query), ("k", key), ("v", key))
        # Those lie head by head, and so does the output, which is copied for the projection.
        yield "attended", query
    elif rotated:
        # The value is a view of the whole projection; queries are copied out to be normalised.
        yield "projected", query + 2 * key + (query if shared else 0)
        yield from (("q", query), ("k", key))
        yield "statistics", sizes.tokens * (sizes.heads + sizes.query_groups) * _WIDE
    else:
        yield "projected", query + 2 * key
        if shared:
            yield "q", query
    yield "out", query
    yield "lse", sizes.tokens * sizes.heads * _WIDE
    yield "dropped", _dropped(config, sizes)


def _latents(config: RunConfig, layout: Layout, sizes: Sizes) -> Iterator[tuple[str, float]]:
    """Latents, what their norms make of them, and heads, which are copied together."""
    item = sizes.tokens * sizes.item_bytes
    # With sequence parallelism the latent is copied out of what was gathered; else it is a part of
    # its projection, shared key and all, or the whole of it.
    shares = layout.tp > 1 and config.parallel.sequence_parallel
    key = sizes.key_latent if shares else sizes.key_latent + sizes.rotated_width
    rows = sizes.shared_tokens * sizes.item_bytes
    yield "latents", sizes.query_latent * item + key * (rows if shares else item)
    if config.model.qk_layernorm:
        yield "normed_latents", (sizes.query_latent + sizes.key_latent) * rows
        statistics = 2 if config.model.normalization == "LayerNorm" else 1
        norms = 2 if sizes.query_latent else 1
        yield "statistics", sizes.shared_tokens * _WIDE * statistics * norms
    value, out = sizes.values_width * item, sizes.out_width * item
    yield from (("q", sizes.query_width * item), ("k", sizes.key_width * item), ("v", value))
    if sizes.value_width == sizes.head_width:
        yield "out", out
    else:  # kernels answer in the width of a key, of which the values' part is copied
        yield from (("out", max(out, sizes.query_width * item)), ("attended", out))
    yield "lse", sizes.tokens * sizes.heads * _WIDE
    yield "dropped", _dropped(config, sizes)


def _feed_forward(sizes: Sizes, width: int) -> Iterator[tuple[str, float]]:
    yield "input", hidden_bytes(sizes)
    yield from _activation(sizes, sizes.tokens, width)


def _activation(sizes: Sizes, rows: float, width: int) -> Iterator[tuple[str, float]]:
    """The first product, the non-linearity and the second product's input."""
    one = rows * width * sizes.item_bytes
    if sizes.gated:
        yield from (("hidden", 2 * one), ("activated", one), ("product", one))
    elif sizes.activation == "relu":  # its output is all that its backward reads
        yield "product", one
    elif sizes.activation == "squared_relu":
        yield from (("activated", one), ("product", one))
    else:
        yield from (("hidden", one), ("product", one))


def _router(sizes: Sizes) -> Iterator[tuple[str, float]]:
    # In float32 whatever the model; where that is the model's dtype it is the norm's output.
    yield "input", sizes.shared_tokens * sizes.hidden * _WIDE
    by_expert = sizes.all_experts * (3 * _WIDE + 2)
    by_choice = sizes.topk * (_INDEX + 2 * _WIDE)
    yield "scores", sizes.shared_tokens * (by_expert + by_choice)


def _dispatcher(config: RunConfig, layout: Layout, sizes: Sizes) -> Iterator[tuple[str, float]]:
    yield "indices", sizes.expert_tokens * (_INDEX + _WIDE)
    # Where tokens are gathered: which of them go to this rank's experts, and with what weight.
    yield "chosen", gathered_tokens(config, layout, sizes) * sizes.experts * (_WIDE + 2)


def _experts(config: RunConfig, sizes: Sizes) -> Iterator[tuple[str, float]]:
    rows = sizes.expert_rows
    yield "input", rows * sizes.hidden * sizes.item_bytes
    yield from _activation(sizes, rows, sizes.expert_ffn)
    yield "weighted", rows * sizes.expert_ffn * sizes.item_bytes
    yield "dropped", _dropped(config, sizes)
