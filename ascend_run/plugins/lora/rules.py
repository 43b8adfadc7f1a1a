"""What a run with adapters cannot do. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ascend_run.plugin_api import CheckpointError

from .peft_config import config_problems, read_adapter
from .targets import ALL, FEED_FORWARD, PEFT_NAMES, adapted, known_targets, only_experts

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import LoraOptions


def problems(config: RunConfig, options: LoraOptions) -> list[str]:
    """A sentence for each."""
    if config.model.get("multi_latent_attention"):
        return [
            (
                "lora: the linears of model.multi_latent_attention=true take no adapters; leave "
                "lora out, or choose a model without it"
            )
        ]
    found = [*_target_problems(config, options)]
    if not found:
        found += _peft_problems(config, options)
    return [f"lora: {problem}" for problem in found]


def _target_problems(config: RunConfig, options: LoraOptions) -> Iterator[str]:
    known = known_targets(config)
    for name in options.target_modules:
        if name not in known:
            yield (
                f"plugins.lora.target_modules names {name!r}; expected some of {', '.join(known)}"
            )
        elif name in FEED_FORWARD and only_experts(config):
            yield (
                f"plugins.lora.target_modules names {name!r}, but every layer has experts "
                f"(model.num_moe_experts={config.model.num_moe_experts}), which stand in one "
                "tensor and take no adapter; name linear_qkv and linear_proj, or all-linear"
            )
    if not options.target_modules:
        yield f"plugins.lora.target_modules is empty; name {ALL}, or some of {', '.join(known)}"


def _peft_problems(config: RunConfig, options: LoraOptions) -> Iterator[str]:
    family = config.model.family
    if family not in PEFT_NAMES:
        named = ", ".join(PEFT_NAMES)
        if options.export:
            yield (
                f"plugins.lora.export=true: PEFT's names are known for {named}, not for {family}; "
                "leave it out"
            )
        if options.load is not None:
            yield (
                f"plugins.lora.load={options.load}: PEFT's names are known for {named}, not for "
                f"{family}"
            )
        return
    if options.load is not None:
        try:
            found = read_adapter(options.load)
        except CheckpointError as error:
            yield str(error)
            return
        parts = adapted(options.target_modules, config)
        yield from config_problems(found, config, options, parts)
