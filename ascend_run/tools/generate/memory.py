"""Memory of a model that generates, before it is built."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ascend_run.core.config.latent_attention import head_widths
from ascend_run.tools.convert.formats.model_source import ModelSource
from ascend_run.types.config import RunConfig


def token_bytes(config: RunConfig, dtype: torch.dtype, *, tp: int = 1, pp: int = 1) -> int:
    """Return the bytes of the keys and values of one token on a rank: of its layers,
    ``G / tp * (D + E) * itemsize``, with at least one head.

    The latent attention's keys and values are expanded to those of each query head.
    """
    model = config.model
    widths = head_widths(model)
    heads: int = model.num_query_groups or model.num_attention_heads
    if model.multi_latent_attention:
        heads = model.num_attention_heads
    of_rank: int = max(heads // tp, 1) * (widths.key + widths.value)
    num_layers: int = -(-model.num_layers // pp)
    return num_layers * of_rank * dtype.itemsize


def memory_problems(
    source: ModelSource, dtype: torch.dtype, cache_tokens: int, free_bytes: int
) -> Iterator[str]:
    """Say what does not fit: the weights, or the cache beside them."""
    weights = sum(header.numel() * dtype.itemsize for header in source.headers.values())
    name = str(dtype).removeprefix("torch.")
    if weights > free_bytes:
        yield (
            f"its weights take {weights / 1e9:.1f} GB in {name}, and {free_bytes / 1e9:.1f} GB are "
            "free; a narrower --dtype takes less"
        )
        return
    cache = cache_tokens * token_bytes(source.config, dtype)
    if weights + cache > free_bytes:
        yield (
            f"its cache of {cache_tokens} tokens takes {cache / 1e9:.1f} GB in {name} beside "
            f"weights of {weights / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB are free; fewer "
            "--max-new-tokens, shorter or fewer prompts, or a narrower --dtype take less"
        )
