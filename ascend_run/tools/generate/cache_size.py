"""Tokens of the key-value cache of a model that is loaded to answer what comes."""

from __future__ import annotations

from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.plugin_api.errors import ConfigError

from .model import GenerationModel


def cache_tokens(model: GenerationModel, wanted: int | None, num_sequences: int) -> int:
    """Return how many tokens the cache is to have.

    Args:
        wanted: The user's; default: what the sequences need at their longest, and at most half of
            the free memory.

    Raises:
        ConfigError: The cache is larger than the free memory.
    """
    import psutil

    of_token = _token_bytes(model)
    free: int = psutil.virtual_memory().available
    if wanted is None:
        return max(min(num_sequences * model.max_length, free // 2 // of_token), 1)
    if wanted * of_token > free:
        problem = (
            f"--cache-tokens {wanted} take {wanted * of_token / 1e9:.1f} GB; at most "
            f"{free // of_token} fit into the free memory"
        )
        raise ConfigError("the cache is too large", [problem])
    return wanted


def _token_bytes(model: GenerationModel) -> int:
    """Return the bytes of one token's keys and values, as a step stores them."""
    cache = model.with_cache(1)
    cache.reserve(0, 1)
    model.logits(Step.of([Chunk(sequence=0, start=0, ids=[0], num_logits=0)]))
    return cache.num_bytes // cache.page_size
