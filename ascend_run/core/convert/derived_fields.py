"""``[model]`` fields that may be left at None, and what Megatron makes of them then. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ascend_run.plugin_api.config import RunConfig


def model_value(config: RunConfig, name: str) -> Any:
    """A field of ``[model]``, derived from the others where it is None and Megatron derives it."""
    value = config.model.get(name)
    return derived_value(config, name) if value is None and name in _DERIVED else value


def derived_value(config: RunConfig, name: str) -> Any:
    """What Megatron makes of a field at None, whatever it is set to."""
    return _DERIVED[name](config)


def _head_width(config: RunConfig) -> Any:
    hidden, heads = config.model.get("hidden_size"), config.model.get("num_attention_heads")
    return hidden // heads if hidden and heads else None


def _feed_forward_width(config: RunConfig) -> Any:
    hidden = config.model.get("hidden_size")
    return 4 * hidden if hidden else None


_DERIVED: Final[dict[str, Callable[[RunConfig], Any]]] = {
    "kv_channels": _head_width,
    "num_query_groups": lambda config: config.model.get("num_attention_heads"),
    "ffn_hidden_size": _feed_forward_width,
    "moe_ffn_hidden_size": lambda config: model_value(config, "ffn_hidden_size"),
    "max_position_embeddings": lambda config: config.data.seq_length,
}

UNREPRESENTED: Final = ("kv_channels", "num_query_groups")
"""Fields that a family without a key for them can have at their derived value only."""
