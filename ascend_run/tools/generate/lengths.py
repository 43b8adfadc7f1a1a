"""How long a model's texts may be, and which lengths have the same rotary angles."""

from __future__ import annotations

from ascend_run.ops.generation.text_lengths import TextLengths
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.types.config import RunConfig


def text_lengths(config: RunConfig, rope_length: int | None) -> TextLengths:
    """Return the lengths of a model's texts.

    Without ``rope_length``, texts of a ``dynamic`` scaling may grow to the length that its factor
    is for: ``factor * max_position_embeddings``.

    Args:
        rope_length: Every text has the angles of a text of this length; the longest one too.

    Raises:
        ConfigError: The length changes no angle of this model, or has no positions.
    """
    if rope_length is None:
        return TextLengths.of_model(config)
    model = config.model
    longest: int = model.max_position_embeddings or config.data.seq_length
    kind = model.rope_scaling_type
    if kind not in ("dynamic", "longrope"):
        raise ConfigError(
            f"--rope-length {rope_length}: it goes with the RoPE scalings dynamic and "
            f"longrope, and this model has {kind or 'none'}; leave it out"
        )
    if kind == "longrope" and rope_length > longest:
        raise ConfigError(
            f"--rope-length {rope_length}: expected at most {longest}, the model's longest text"
        )
    return TextLengths(rope_length)
