"""Conflicts of LoRA with the rest of a run. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_run.plugin_api import CheckpointError
from ascend_run.text.file_collisions import NamedPath, file_collisions

from .peft_checks import config_problems
from .peft_config import TENSOR_FILE, export_folder, read_adapter
from .peft_names import PEFT_NAMES
from .saved_modules import PEFT_MODULES, module_problems, unnamed
from .sizes import pattern_problems
from .targets import (
    ALL,
    EXPERT_PARTS,
    EXPERTS,
    FEED_FORWARD,
    SHARED_EXPERTS,
    adapted,
    has_shared_experts,
    hint,
    known_targets,
    model_linears,
    only_experts,
    unnamed_parts,
    wanted_experts,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import LoraOptions


def problems(config: RunConfig, options: LoraOptions) -> list[str]:
    """Return one sentence for each conflict."""
    found = [*_target_problems(config, options), *module_problems(config, options)]
    found += _expert_problems(options)
    if not found:
        found += pattern_problems(config, options)
    if not found:
        found += _peft_problems(config, options)
    return [f"lora: {problem}" for problem in found]


def _target_problems(config: RunConfig, options: LoraOptions) -> Iterator[str]:
    known = known_targets(config)
    given = options.target_modules
    for name in dict.fromkeys(given):
        if given.count(name) > 1:
            yield f"plugins.lora.target_modules names {name!r} twice; expected it once"
        if name not in known and name in (EXPERTS, *EXPERT_PARTS):
            yield (
                f"plugins.lora.target_modules names {name!r}, but no layer has experts "
                f"(model.num_moe_experts={config.model.num_moe_experts}); expected some of "
                f"{', '.join(known)}"
            )
        elif name not in known and name in SHARED_EXPERTS:
            yield (
                f"plugins.lora.target_modules names {name!r}, but no layer has shared experts "
                "(model.moe_shared_expert_intermediate_size="
                f"{config.model.moe_shared_expert_intermediate_size}); expected some of "
                f"{', '.join(known)}"
            )
        elif name not in known:
            yield (
                f"plugins.lora.target_modules names {name!r}{hint(name, known)}; expected some of "
                f"{', '.join(known)}"
            )
        elif name in FEED_FORWARD and not has_shared_experts(config) and only_experts(config):
            yield (
                f"plugins.lora.target_modules names {name!r}, but every layer has experts "
                f"(model.num_moe_experts={config.model.num_moe_experts}, model.moe_layer_freq="
                f"{_listed(config.model.moe_layer_freq)}), which have stacked weights; name "
                f"{EXPERTS}, some of {_attention(config)}, or {ALL}"
            )
    if not options.target_modules:
        yield f"plugins.lora.target_modules is empty; name {ALL}, or some of {', '.join(known)}"


def _expert_problems(options: LoraOptions) -> Iterator[str]:
    """Yield the options that adapters of experts do not have; nor do PEFT's."""
    if not (parts := wanted_experts(options.target_modules)):
        return
    named = f"adapters of {' and '.join(parts)} (plugins.lora.target_modules)"
    if options.dropout:
        yield (
            f"plugins.lora.dropout={options.dropout}: {named} are added to the weights, which have "
            "no dropout of their own; set it to 0, or leave the experts out"
        )
    if options.dora:
        yield (
            f"plugins.lora.dora=true: {named} have no magnitudes; set it to false, or leave the "
            "experts out"
        )


def _attention(config: RunConfig) -> str:
    found = [name.rpartition(".") for name in model_linears(config)]
    return ", ".join(name for block, _, name in found if block == "self_attention")


def _listed(frequency: int | Sequence[int]) -> int | list[int]:
    """Return the frequency in the form of a config file."""
    return frequency if isinstance(frequency, int) else list(frequency)


def exports(config: RunConfig, options: LoraOptions) -> bool:
    """Return whether the run writes its adapter in PEFT's format."""
    if options.export is None:
        lacking = unnamed(config, options) or unnamed_parts(options.target_modules, config)
        return config.model.family in PEFT_NAMES and not lacking
    return options.export


def _peft_problems(config: RunConfig, options: LoraOptions) -> Iterator[str]:
    family = config.model.family
    unknown, known = "", ""
    if family not in PEFT_NAMES:
        unknown, known = family, ", ".join(PEFT_NAMES)
    elif parts := unnamed_parts(options.target_modules, config):
        unknown = f"{', '.join(parts)} of {family}"
        known = ", ".join(PEFT_NAMES[family])
    elif modules := unnamed(config, options):
        unknown = f"{', '.join(modules)} of {family}"
        known = ", ".join(PEFT_MODULES[family])
    if unknown:
        if options.export:
            yield (
                f"plugins.lora.export=true: PEFT's names are known for {known}, not for {unknown}; "
                "leave it out"
            )
        if options.load is not None:
            yield (
                f"plugins.lora.load={options.load}: PEFT's names are known for {known}, not for "
                f"{unknown}"
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
        if options.export is not False:
            read, written = Path(options.load), export_folder(config)
            yield from file_collisions(
                [NamedPath("plugins.lora.load", read / TENSOR_FILE)],
                [NamedPath("plugins.lora.export", written / TENSOR_FILE)],
            )
