"""The page of one preset. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from .presets import Preset
from .run_file import toml
from .runs import model_values


def model_section(preset: Preset) -> dict[str, Any]:
    """Return the ``[model]`` section that a preset's numbers make.

    Raises:
        ConfigError: The family cannot represent the record.
    """
    return {key.removeprefix("model."): value for key, value in model_values(preset).items()}


def described(preset: Preset) -> dict[str, Any]:
    """Return everything of a preset, with its ``[model]`` section, as JSON values.

    Raises:
        ConfigError: The family cannot represent the record.
    """
    return {
        **attrs.asdict(preset, recurse=False),
        "config": preset.config_json,
        "context": preset.context,
        "seq_length": preset.default_seq_length,
        "model": model_section(preset),
    }


def page_lines(preset: Preset) -> Iterator[str]:
    """Yield the page of a preset.

    Raises:
        ConfigError: The family cannot represent the record.
    """
    model = {f"model.{k}": value for k, value in model_section(preset).items() if value is not None}
    yield f"{preset.name}: {preset.parameters:,} parameters ({preset.published} as published)"
    yield ""
    facts = {
        "family": preset.family,
        "source": preset.source,
        "context": f"{preset.context:,} tokens",
        "template": preset.template or "the tokenizer's own",
        "sequence": f"{preset.default_seq_length:,} tokens in a run, unless --seq-length is given",
        "note": preset.note,
    }
    yield from (f"  {label:<9} {value}" for label, value in facts.items() if value)
    yield ""
    yield "  config.json"
    yield from (f"    {key} = {_short(value)}" for key, value in preset.config_json.items())
    yield ""
    yield from (f"  {line}".rstrip() for line in toml(model).splitlines())


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_short(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"{len(value)} numbers, {value[0]} to {value[-1]}"
    return str(value).lower() if isinstance(value, bool) else str(value)
