"""Activations that the plain model's layers save for backward, tensor by tensor.

Follows the modules of ``core.model`` and of Megatron: what each autograd node saves, counting each
storage once. Attention is a fused kernel, which saves q, k, v, its output and the log-sum-exp.
Routing is assumed to be balanced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ascend_run.plugin_api.contracts import SavedTensor
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .sizes import Sizes

_WIDE = 4
_INDEX = 8
"""Bytes of float32 and of int64."""


def layer_saved(
    config: RunConfig, layout: Layout, sizes: Sizes, *, moe: bool
) -> tuple[SavedTensor, ...]:
    """Return the tensors that one layer saves for one micro-batch, in the order of the forward."""
    before, after = norm_of_inputs(config), norm_of_outputs(config)
    parts: dict[str, Iterable[tuple[str, float]]] = {
        "input_norm": _norm(config, sizes) if before else (),
        "self_attention": _attention(config, layout, sizes),
        "self_attn_bda": _output_norm(config, sizes) if after else (),
        "mlp_norm": _norm(config, sizes) if before else (),
    }
    if moe:
        if sizes.shared_ffn:
            parts["shared_experts"] = _feed_forward(sizes, sizes.shared_ffn)
        parts |= {
            "router": _router(config, sizes),
            "dispatcher": _dispatcher(config, layout, sizes),
            "experts": _experts(config, sizes),
        }
    else:
        parts["mlp"] = (*_feed_forward(sizes, sizes.ffn), ("dropped", _dropped(config, sizes)))
    parts["mlp_bda"] = _output_norm(config, sizes) if after else ()
    return tuple(
        SavedTensor(part=part, name=name, nbytes=nbytes)
        for part, tensors in parts.items()
        for name, nbytes in tensors
        if nbytes
    )


def embedding_norm_saved(config: RunConfig, sizes: Sizes) -> float:
    """Return the bytes that the norm of the embeddings saves for one micro-batch."""
    if not config.model.embedding_layernorm:
        return 0.0
    return sum(nbytes for _, nbytes in _norm(config, sizes))


def mtp_saved(config: RunConfig, sizes: Sizes) -> tuple[SavedTensor, ...]:
    """Return what a layer of multi-token prediction saves besides its transformer layer: the inputs
    of its three norms and of its projection."""
    norms = {"enorm": _norm, "hnorm": _output_norm, "final_norm": _norm}
    tensors = {
        f"{norm}.{name}": nbytes
        for norm, of_input in norms.items()
        for name, nbytes in of_input(config, sizes)
    }
    tensors["eh_proj.input"] = 2 * hidden_bytes(sizes)
    return tuple(
        SavedTensor(part="mtp", name=name, nbytes=nbytes) for name, nbytes in tensors.items()
    )


def norm_of_inputs(config: RunConfig) -> bool:
    """Return whether the inputs of the attention and MLP blocks are normalized."""
    return bool(config.model.norm_placement != "post")


def norm_of_outputs(config: RunConfig) -> bool:
    """Return whether the outputs of the attention and MLP blocks are normalized."""
    return bool(config.model.norm_placement != "pre")


def gathered_tokens(config: RunConfig, layout: Layout, sizes: Sizes) -> int:
    """Return the number of tokens that the all-gather dispatcher gathers; 0 for other ones."""
    ranks = layout.ep * layout.expt_tp
    gathers = config.model.moe_token_dispatcher_type == "allgather"
    return ranks * sizes.shared_tokens if gathers and ranks > 1 else 0


def gathered_heads(layout: Layout, sizes: Sizes) -> float:
    """Return the bytes of the QKV projection of all tensor-parallel ranks, which they gather if
    several of them share a key-value group; else 0."""
    own = sizes.query_width + sizes.key_width + sizes.values_width
    if sizes.key_latent or own == sizes.qkv_rows:
        return 0.0
    return sizes.tokens * sizes.qkv_rows * layout.tp * sizes.item_bytes


def gather_buffer(config: RunConfig, layout: Layout, sizes: Sizes, *, moe: bool) -> float:
    """Return the bytes of Megatron's global buffer for gathered hidden states, which is never
    freed."""
    tokens = gathered_tokens(config, layout, sizes) if moe else 0
    if layout.tp > 1 and config.parallel.sequence_parallel:
        tokens = max(tokens, sizes.tokens)
    return tokens * sizes.hidden * sizes.item_bytes


def _dropped(config: RunConfig, sizes: Sizes) -> float:
    """Bytes of the dropout mask of a sublayer's output."""
    return hidden_bytes(sizes) if config.model.hidden_dropout else 0.0


def hidden_bytes(sizes: Sizes) -> float:
    """Return the bytes of a hidden state outside of tensor-parallel regions, in a sublayer."""
    return sizes.shared_tokens * sizes.hidden * sizes.item_bytes


def stream_bytes(sizes: Sizes) -> float:
    """Return the bytes of a hidden state between layers."""
    return sizes.shared_tokens * sizes.hidden * sizes.stream_bytes


def _norm(config: RunConfig, sizes: Sizes) -> Iterator[tuple[str, float]]:
    yield "input", stream_bytes(sizes)
    if sizes.stream_bytes != sizes.item_bytes:
        yield "weight", sizes.hidden * sizes.stream_bytes
    statistics = 2 if config.model.normalization == "LayerNorm" else 1
    yield "statistics", sizes.shared_tokens * _WIDE * statistics


def _output_norm(config: RunConfig, sizes: Sizes) -> Iterator[tuple[str, float]]:
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
    normed = model.qk_layernorm or model.qk_l2_norm
    if rotated and not normed:  # split and rotated into new tensors
        yield from (("q", query), ("k", key), ("v", key))
        # They are stored head by head, and so is the output, which is copied for the projection.
        yield "attended", query
    elif rotated:
        # The value is a view of the QKV projection; queries are copied to be normalized.
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
    """Latents, normalized latents, and heads, which are concatenated."""
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
    else:  # kernels return the width of a key, of which the values' part is copied
        yield from (("out", max(out, sizes.query_width * item)), ("attended", out))
    yield "lse", sizes.tokens * sizes.heads * _WIDE
    yield "dropped", _dropped(config, sizes)


def _feed_forward(sizes: Sizes, width: int) -> Iterator[tuple[str, float]]:
    yield "input", hidden_bytes(sizes)
    yield from _activation(sizes, sizes.tokens, width)


def _activation(sizes: Sizes, rows: float, width: int) -> Iterator[tuple[str, float]]:
    """Output of fc1, output of the activation, and input of fc2."""
    one = rows * width * sizes.item_bytes
    if sizes.gated:
        yield from (("hidden", 2 * one), ("activated", one), ("product", one))
        yield "clamped", sizes.glu_copies * one
    elif sizes.activation == "relu":  # its backward reads only its output
        yield "product", one
    elif sizes.activation == "squared_relu":
        yield from (("activated", one), ("product", one))
    else:
        yield from (("hidden", one), ("product", one))
    if sizes.activation == "quick_gelu":
        yield "sigmoid", one


def _router(config: RunConfig, sizes: Sizes) -> Iterator[tuple[str, float]]:
    if not sizes.shared_ffn:  # whose input it is too
        yield "input", hidden_bytes(sizes)
    # What experts keep; with padding, weights and choices are not saved in the order of experts.
    capacity = int(sizes.drops) - (_WIDE + 1) * _is_padded(config, sizes)
    by_expert = sizes.all_experts * (3 * _WIDE + 2 + capacity)
    by_choice = sizes.topk * (_INDEX + 2 * _WIDE)
    yield "scores", sizes.shared_tokens * (by_expert + by_choice)


def _dispatcher(config: RunConfig, layout: Layout, sizes: Sizes) -> Iterator[tuple[str, float]]:
    indices = 2 if _is_padded(config, sizes) else 1
    gathers = config.model.moe_token_dispatcher_type == "allgather"
    weights = sizes.expert_tokens if gathers else sizes.expert_rows
    yield "indices", sizes.expert_tokens * indices * _INDEX + weights * _WIDE
    # With gathered tokens: indices and weights of those for this rank's experts.
    yield "chosen", gathered_tokens(config, layout, sizes) * sizes.experts * (_WIDE + 2)


def _is_padded(config: RunConfig, sizes: Sizes) -> bool:
    """Return whether a dispatcher relies on padded experts."""
    return sizes.pads and config.model.moe_token_dispatcher_type != "allgather"


def _experts(config: RunConfig, sizes: Sizes) -> Iterator[tuple[str, float]]:
    rows = sizes.expert_rows
    yield "input", rows * sizes.hidden * sizes.item_bytes
    yield from _activation(sizes, rows, sizes.expert_ffn)
    yield "weighted", rows * sizes.expert_ffn * sizes.item_bytes
    yield "dropped", _dropped(config, sizes)


def rotary_bytes(config: RunConfig, sizes: Sizes) -> float:
    """Bytes of the cosines and sines for this rank's positions."""
    if config.model.position_embedding_type != "rope":
        return 0.0
    tables = 2 if config.model.rotary_local_base else 1
    return tables * 2 * sizes.tokens / sizes.micro_batch * sizes.rotated_width * sizes.item_bytes
