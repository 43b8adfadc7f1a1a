"""``[model]`` fields whose None Megatron replaces by a derived value. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ascend_run.types.config import FieldSection, RunConfig


def model_value(config: RunConfig, name: str) -> Any:
    """Return a ``[model]`` field, or the value that Megatron derives for None."""
    value = config.model[name]
    return derived_value(config, name) if value is None and name in _DERIVED else value


def completed_model(config: RunConfig) -> FieldSection:
    """Return ``[model]`` with the values that Megatron derives for None."""
    return FieldSection({name: model_value(config, name) for name in config.model})


def derived_value(config: RunConfig, name: str) -> Any:
    """Return the value that Megatron derives for None, regardless of the field's value."""
    return _DERIVED[name](config)


def _head_width(config: RunConfig) -> Any:
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    return hidden // heads if hidden and heads else None


def _feed_forward_width(config: RunConfig) -> Any:
    hidden = config.model.hidden_size
    return 4 * hidden if hidden else None


_BIASES: Final = tuple(f"add_{kind}_bias" for kind in ("linear_proj", "mlp", "router", "expert"))
_DERIVED: Final[dict[str, Callable[[RunConfig], Any]]] = {
    "kv_channels": _head_width,
    "num_query_groups": lambda config: config.model.num_attention_heads,
    "ffn_hidden_size": _feed_forward_width,
    "moe_ffn_hidden_size": lambda config: model_value(config, "ffn_hidden_size"),
    "max_position_embeddings": lambda config: config.data.seq_length,
    **dict.fromkeys(_BIASES, lambda config: bool(config.model.add_bias_linear)),
}

UNREPRESENTED: Final = ("kv_channels", "num_query_groups", *_BIASES)
"""Fields that must have their derived value if a family has no key for them."""
