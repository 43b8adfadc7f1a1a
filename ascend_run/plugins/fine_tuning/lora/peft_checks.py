"""Check whether a stored adapter in PEFT format matches a run. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ascend_run.ops.linear.peft_base import other_base
from ascend_run.ops.linear.peft_settings import (
    SCORES,
    alpha_of,
    expert_parameters,
    rank_of,
    saved_tensors,
    untied,
)
from ascend_run.plugin_api.error_text import show

from .peft_config import PREFIX, TENSOR_FILE, StoredAdapter, neutral_problems
from .peft_names import PEFT_NAMES
from .saved_modules import (
    EMBEDDING,
    OUTPUT_LAYER,
    SCORE,
    TIED,
    is_tied,
    module_of,
    modules_in_full,
)
from .sizes import alpha_of_part, rank_of_part
from .targets import EXPERT_PARTS, PEFT_EXPERTS, adapted, peft_module

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import LoraOptions

_HEADS: Final = ("classifier", "score")
_TENSOR: Final = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(.+)\.(?:lora_[AB]\.weight|lora_magnitude_vector)"
)


def config_problems(
    found: StoredAdapter, config: RunConfig, options: LoraOptions, parts: Sequence[str]
) -> Iterator[str]:
    """Yield why a stored adapter does not match this run.

    Args:
        parts: The parts that the run adapts.
    """
    neutral = [*neutral_problems(found)]
    yield from neutral
    if not neutral:
        yield from _size_problems(found, config, options, parts)
    for option, ours in (("rslora", options.rslora), ("dora", options.dora)):
        theirs = bool(found.config.get(f"use_{option}"))
        if ours != theirs:
            yield (
                f"plugins.lora.{option}={show(ours)}, but the adapter in {found.folder} has "
                f"{show(theirs)}; set plugins.lora.{option}={show(theirs)}"
            )
    yield from _tensor_problems(found, config, parts)
    yield from _module_problems(found, config, options)
    base = config.model.hf_path
    if base is not None and (other := other_base(found.metadata, found.config, base)):
        yield f"{found.named}={found.folder}: {other}"


def _size_problems(
    found: StoredAdapter, config: RunConfig, options: LoraOptions, parts: Sequence[str]
) -> Iterator[str]:
    """Yield how the ranks and alphas of a stored adapter differ from those of this run."""
    modules = _modules(found, config, parts)
    for option, of_module, of_part, default, pattern in (
        ("rank", rank_of, rank_of_part, options.rank, options.rank_pattern),
        ("alpha", alpha_of, alpha_of_part, options.alpha, options.alpha_pattern),
    ):
        theirs = {
            part: sorted({of_module(found.config, name) for name in names})
            for part, names in modules.items()
        }
        if several := {part: values for part, values in theirs.items() if len(values) > 1}:
            yield (
                f"plugins.lora.load: {found.folder} has several {option}s for a linear, by layer: "
                f"{several}; expected one for all layers"
            )
        elif any(values != [of_part(part, options)] for part, values in theirs.items()):
            yield _other_sizes(found, option, {p: v for p, [v] in theirs.items()}, default, pattern)


def _other_sizes(
    found: StoredAdapter,
    option: str,
    theirs: Mapping[str, float],
    default: float,
    pattern: Mapping[str, float],
) -> str:
    """Return how to set the values of a stored adapter."""
    common = Counter(theirs.values()).most_common(1)[0][0]
    others = ", ".join(f"{part} = {value}" for part, value in theirs.items() if value != common)
    ours, wanted = f"plugins.lora.{option}={default}", f"plugins.lora.{option}={common}"
    values = f"{common}"
    if pattern or others:
        ours += f" and plugins.lora.{option}_pattern={dict(pattern)}"
        wanted += f" and plugins.lora.{option}_pattern={{{others}}}"
        values = "others"
    return f"{ours}, but the adapter in {found.folder} has {values}; set {wanted}"


def _modules(found: StoredAdapter, config: RunConfig, parts: Sequence[str]) -> dict[str, list[str]]:
    """Return part -> its modules that have a stored adapter, of experts their parameters; parts
    without one are left out."""
    stored = {name[len(PREFIX) :].rpartition(".lora_")[0] for name in found.shapes}
    modules = {
        part: [
            f"model.layers.{layer}.{PEFT_EXPERTS}.{EXPERT_PARTS[part]}"
            if part in EXPERT_PARTS
            else module
            for layer in range(config.model.num_layers)
            if (module := peft_module(part, layer, config.model.family, parts)) in stored
        ]
        for part in parts
    }
    return {part: names for part, names in modules.items() if names}


def _tensor_problems(
    found: StoredAdapter, config: RunConfig, parts: Sequence[str]
) -> Iterator[str]:
    names = PEFT_NAMES[config.model.family]
    part_of = {module: part for part, module in names.items()}
    of_parameter = {name: part for part, name in EXPERT_PARTS.items()}
    experts = expert_parameters(found.config)
    part_of |= {module: of_parameter[name] for module, name in experts.items()}
    stored: set[str] = set()
    foreign: list[str] = []
    in_full = _saved(found, config)
    for name in sorted(found.shapes.keys() - in_full.keys()):
        match = _TENSOR.fullmatch(name)
        part = part_of.get(match[2]) if match else None
        if match is None or part is None or int(match[1]) >= config.model.num_layers:
            foreign.append(name)
        else:
            stored.add(part)
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        yield (
            f"plugins.lora.load: {found.folder} holds tensors that this model does not have: "
            f"{', '.join(foreign[:3])}{more}"
        )
    if stored != set(parts):
        its = [part for part in (*names, *EXPERT_PARTS) if part in stored]
        if lacking := {*adapted(its, config)} - stored:
            yield (
                f"plugins.lora.load: the adapter in {found.folder} has {', '.join(its)} of dense "
                f"layers without {', '.join(sorted(lacking))}, which the same targets mean; "
                "expected both"
            )
            return
        yield (
            f"plugins.lora.load: the adapter in {found.folder} adapts other parts than this run; "
            f"set plugins.lora.target_modules={','.join(its) or 'none'}"
        )


def _saved(found: StoredAdapter, config: RunConfig) -> dict[str, str]:
    """Map the tensors of modules that were saved in full to our names of the modules."""
    modules = {
        name: module_of(theirs.rpartition(".")[0], config.model.family)
        for name, theirs in saved_tensors(found.shapes).items()
    }
    return {name: module for name, module in modules.items() if module is not None}


def _module_problems(
    found: StoredAdapter, config: RunConfig, options: LoraOptions
) -> Iterator[str]:
    names = [name.rpartition(".")[0] for name in saved_tensors(found.shapes).values()]
    # PEFT names heads of both kinds of Hugging Face's classes that score, of which a model has one.
    heads = _HEADS if found.config.get("task_type") == SCORES else ()
    for module in found.config.get("modules_to_save") or ():
        if module not in heads and not any(name.endswith(module) for name in names):
            yield (
                f"plugins.lora.load: {found.folder} has modules_to_save={module}, but "
                f"{TENSOR_FILE} has no tensor of it; save the adapter again"
            )
    theirs = {*_saved(found, config).values()}
    both = {EMBEDDING, OUTPUT_LAYER}
    if is_tied(config) and (its := theirs & both):  # which PEFT's files have twice
        if its != both:
            yield f"plugins.lora.load: {found.folder}: {untied(*TIED)}"
            return
        theirs.discard(OUTPUT_LAYER)
    ours = modules_in_full(config, options)
    if {SCORE} & theirs != {SCORE} & ours:
        yield _other_output(found, config)
    elif theirs != ours:
        yield (
            f"plugins.lora.modules_to_save={_listed(ours)}, but the adapter in "
            f"{found.folder} has {_listed(theirs)}; set plugins.lora.modules_to_save="
            f"{_listed(theirs)}"
        )


def _other_output(found: StoredAdapter, config: RunConfig) -> str:
    """Return why only one of an adapter and the model has a score head."""
    if config.model.num_labels:
        return (
            f"plugins.lora.load: the adapter in {found.folder} has no score head, and this model "
            f"has one (model.num_labels={config.model.num_labels}); name the adapter of such a "
            "model, or merge this one first (ascend-run convert --to hf --adapter) and train from "
            "the result"
        )
    return (
        f"plugins.lora.load: the adapter in {found.folder} has a score head, and this model "
        "predicts tokens; name the adapter of such a model, or train a task with a score head (orm)"
    )


def _listed(modules: Collection[str]) -> str:
    return "[" + ",".join(sorted(modules)) + "]"
