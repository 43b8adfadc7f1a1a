"""Working memory of a layer's backward, and when it frees saved activations.

A step is one or a few autograd nodes. While it runs, its working memory is allocated; after it, the
tensors that only it reads are freed. The peak of a training step is nearly always in one of these
steps or in the loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .saved import gathered_heads, gathered_tokens, hidden_bytes, norm_of_inputs, norm_of_outputs
from .sizes import Sizes

_WIDE = 4


@attrs.frozen
class Step:
    """One step of a layer's backward."""

    part: str
    name: str
    working: float
    """Unit: bytes."""
    frees: tuple[str, ...] = ()
    """Names of saved tensors of the part that it frees; the part's last step frees all others."""

    @property
    def key(self) -> str:
        """``part.name``."""
        return f"{self.part}.{self.name}"


def layer_backward(
    config: RunConfig, layout: Layout, sizes: Sizes, *, moe: bool
) -> tuple[Step, ...]:
    """Return the steps of one layer, in the order in which backward runs them."""
    before, after = norm_of_inputs(config), norm_of_outputs(config)
    return (
        *([_norm(config, sizes, "mlp_bda")] if after else []),
        *(
            _moe(config, layout, sizes)
            if moe
            else _feed_forward(config, layout, sizes, "mlp", sizes.ffn)
        ),
        *([_norm(config, sizes, "mlp_norm")] if before else []),
        *([_norm(config, sizes, "self_attn_bda")] if after else []),
        *_attention(config, layout, sizes),
        *([_norm(config, sizes, "input_norm")] if before else []),
    )


def norm_backward(config: RunConfig, sizes: Sizes) -> float:
    """Return the bytes of the output gradient, and of the normalized input and its products in the
    dtype of the statistics."""
    rows, item = sizes.shared_tokens * sizes.hidden, sizes.stream_bytes
    wide = 3 if item < _WIDE else 2
    if config.model.normalization == "LayerNorm":
        return rows * item * 2
    return rows * (item + wide * _WIDE)


def _norm(config: RunConfig, sizes: Sizes, part: str) -> Step:
    return Step(part, "norm", norm_backward(config, sizes), ("input", "statistics"))


def _gathered(config: RunConfig, layout: Layout, sizes: Sizes) -> float:
    """Bytes of an output gradient that sequence parallelism all-gathers for a matmul."""
    if layout.tp == 1 or not config.parallel.sequence_parallel:
        return 0.0
    return sizes.tokens * sizes.hidden * sizes.item_bytes


def _feed_forward(
    config: RunConfig, layout: Layout, sizes: Sizes, part: str, width: int
) -> Iterator[Step]:
    item, gathered = sizes.item_bytes, _gathered(config, layout, sizes)
    one = sizes.tokens * width * item
    weight = sizes.hidden * width * item
    yield Step(part, "fc2", one + gathered + weight, ("product",))
    inner = sizes.fc1_rows * one
    yield Step(part, "activation", one + inner, ("hidden", "activated"))
    below = sizes.tokens * sizes.hidden * item
    yield Step(part, "fc1", inner + below + sizes.fc1_rows * weight, ("input",))


def _attention(config: RunConfig, layout: Layout, sizes: Sizes) -> Iterator[Step]:
    item, gathered = sizes.item_bytes, _gathered(config, layout, sizes)
    query = sizes.tokens * sizes.query_width * item
    mixed = query + 2 * sizes.tokens * sizes.key_width * item
    part = "self_attention"
    if sizes.key_latent:
        yield from _latents(config, layout, sizes)
        return
    weight = sizes.hidden * sizes.query_width * item
    yield Step(part, "proj", query + gathered + weight, ("attended", "copied"))
    yield Step(part, "core", query + mixed, ("q", "k", "v", "out", "lse"))
    yield Step(part, "split", 2 * mixed, ("projected", "statistics"))
    if whole := gathered_heads(layout, sizes):  # padded with zeros, and sorted to be reduced
        yield Step(part, "share", mixed + 2 * whole)
    rows = sizes.qkv_rows
    below = sizes.tokens * sizes.hidden * item
    yield Step(part, "qkv", mixed + below + rows * sizes.hidden * item, ("input",))


def _latents(config: RunConfig, layout: Layout, sizes: Sizes) -> Iterator[Step]:
    item, gathered = sizes.item_bytes, _gathered(config, layout, sizes)
    part, hidden = "self_attention", sizes.hidden
    latents = sizes.query_latent + sizes.key_latent
    out, query = sizes.tokens * sizes.out_width * item, sizes.tokens * sizes.query_width * item
    heads = 2 * query + sizes.tokens * sizes.values_width * item
    yield Step(
        part, "proj", out + gathered + hidden * sizes.out_width * item, ("attended", "copied")
    )
    yield Step(part, "core", out + heads, ("q", "k", "v", "out", "lse"))
    not_rotated = sizes.key_width - sizes.query_groups * sizes.rotated_width
    above = sizes.query_width * sizes.query_latent
    above += (not_rotated + sizes.values_width) * sizes.key_latent
    narrow = sizes.tokens * latents * item
    yield Step(part, "up", heads + narrow + above * item, ("normed_latents",))
    yield Step(part, "norms", 3 * narrow, ("latents", "statistics"))
    below = (latents + sizes.rotated_width) / layout.tp
    below += 0 if sizes.query_latent else sizes.query_width
    inputs = 2 * sizes.tokens * hidden  # input gradients of both matmuls
    yield Step(part, "down", narrow + (inputs + below * hidden) * item, ("input",))


def _moe(config: RunConfig, layout: Layout, sizes: Sizes) -> Iterator[Step]:
    """The loop over experts: memory of the first of them, then the gradients of all weights."""
    item = sizes.item_bytes
    outer = sizes.expert_rows * sizes.hidden * item
    inner = sizes.expert_rows * sizes.expert_ffn * item
    gathered = gathered_tokens(config, layout, sizes) * sizes.hidden
    if gathered:  # reduced in float32, then cast to the model's dtype
        own = sizes.shared_tokens * sizes.hidden * _WIDE
        yield Step("dispatcher", "combine", own + gathered * (_WIDE + item))
    else:
        yield Step("dispatcher", "combine", 2 * outer)
    first = inner / max(1, sizes.experts)
    yield Step("experts", "activation", outer + (2 + sizes.fc1_rows) * first)
    weights = sizes.experts * sizes.expert_ffn * sizes.hidden * (1 + sizes.fc1_rows) * item
    yield Step(
        "experts",
        "weights",
        outer + 2 * weights,
        ("hidden", "activated", "product", "weighted", "input"),
    )
    if gathered:
        yield Step("dispatcher", "dispatch", outer + gathered * item)
    wide = sizes.shared_tokens * sizes.hidden * _WIDE
    yield Step("router", "gate", outer + wide + hidden_bytes(sizes), ("input", "scores"))
