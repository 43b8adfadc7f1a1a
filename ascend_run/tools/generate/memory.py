"""Memory of a model that generates, before it is built."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ascend_run.core.config.latent_attention import head_widths
from ascend_run.tools.convert.formats.model_source import ModelSource
from ascend_run.types.config import RunConfig

from .model_options import ModelOptions


def token_bytes(config: RunConfig, dtype: torch.dtype, tp: int = 1) -> int:
    """Return the bytes of the keys and values of one token, on all ranks of a replica:
    ``layers * G * (D + E) * itemsize``, where each tensor-parallel rank has at least one of the G
    heads. Of multi-latent attention ``layers * tp * (L + R) * itemsize``: each of those ranks has
    the whole latent and the shared key.
    """
    model = config.model
    if model.multi_latent_attention:
        width: int = model.num_layers * (model.kv_lora_rank + model.qk_pos_emb_head_dim)
        return tp * width * dtype.itemsize
    widths = head_widths(model)
    heads: int = model.num_query_groups or model.num_attention_heads
    num_layers: int = model.num_layers
    return num_layers * max(heads, tp) * (widths.key + widths.value) * dtype.itemsize


def memory_problems(
    source: ModelSource,
    dtype: torch.dtype,
    cache_tokens: int,
    free_bytes: int,
    options: ModelOptions,
) -> Iterator[str]:
    """Say what does not fit: the weights, or the cache beside them; of all ranks, which are on
    this machine."""
    replicas = options.replicas
    weights = replicas * sum(h.numel() * dtype.itemsize for h in source.headers.values())
    name = str(dtype).removeprefix("torch.")
    if weights > free_bytes:
        yield (
            f"its weights take {weights / 1e9:.1f} GB in {name}, and {free_bytes / 1e9:.1f} GB are "
            "free; a narrower --dtype takes less"
        )
        return
    cache = replicas * cache_tokens * token_bytes(source.config, dtype, options.tp)
    if weights + cache > free_bytes:
        yield (
            f"its cache of {cache_tokens} tokens takes {cache / 1e9:.1f} GB in {name} beside "
            f"weights of {weights / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB are free; fewer "
            "--max-new-tokens, shorter or fewer prompts, or a narrower --dtype take less"
        )
