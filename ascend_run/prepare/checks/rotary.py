"""Check the RoPE scaling keys of ``[model]``."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.core.config.latent_attention import head_widths
from ascend_run.core.config.rotary_keys import NAMES, PARAMETERS, PREFIX, REQUIRED
from ascend_run.plugin_api.error_text import show
from ascend_run.types.config import RunConfig


def rotary_problems(config: RunConfig) -> Iterator[str]:
    """Yield a message for each parameter that is missing, unused or of the wrong size."""
    model = config.model
    kind = model.rope_scaling_type
    given = [name for name in NAMES[1:] if model[name] is not None]
    if kind is None or model.position_embedding_type != "rope":
        why = "rope_scaling_type" if kind is None else "position_embedding_type=rope"
        idle = given if kind is None else [NAMES[0], *given]
        yield from (f"model.{name}={show(model[name])} needs model.{why}" for name in idle)
        return
    for name in given:
        if name.removeprefix(PREFIX) not in PARAMETERS[kind]:
            yield f"model.{name} is not read by model.rope_scaling_type={kind}; leave it out"
    for name in REQUIRED[kind]:
        if model[f"{PREFIX}{name}"] is None:
            yield f"model.rope_scaling_type={kind} needs model.{PREFIX}{name}"
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if kind == "llama3" and low and high and not low < high:
        yield (
            f"model.rope_scaling_low_freq_factor={low} must be below "
            f"model.rope_scaling_high_freq_factor={high}"
        )
    width = head_widths(model).rotated
    if kind == "dynamic" and width <= 2:
        yield f"model.rope_scaling_type=dynamic needs 2 pairs in a head, not {width // 2}"
    for name in ("short_factor", "long_factor"):
        factors = model[f"{PREFIX}{name}"]
        if kind == "longrope" and factors is not None:
            if len(factors) != width // 2:
                numbers = f"model.{PREFIX}{name} has {len(factors)} numbers"
                yield f"{numbers}; a head has {width // 2} pairs"
            if not all(factor > 0 for factor in factors):
                yield f"model.{PREFIX}{name}={show(factors)} must be above 0 throughout"
