"""The page of one preset. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from .presets import Preset
from .run_file import toml
from .runs import model_values


def described(preset: Preset) -> dict[str, Any]:
    """Return everything of a preset, with the ``[model]`` section that its numbers make.

    Raises:
        ConfigError: The family cannot represent the record.
    """
    model = model_values(preset)
    shown = attrs.asdict(preset, recurse=False)
    return (
        shown
        | {
            "config": preset.config_json,
            "context": preset.context,
            "seq_length": preset.default_seq_length,
        }
        | {"model": {key.removeprefix("model."): value for key, value in model.items()}}
    )


def page_lines(shown: Mapping[str, Any]) -> Iterator[str]:
    """Yield the page of ``described``."""
    yield f"{shown['name']}: {shown['parameters']:,} parameters ({shown['published']} as published)"
    yield ""
    facts = {
        "family": shown["family"],
        "source": shown["source"],
        "context": f"{shown['context']:,} tokens",
        "template": shown["template"] or "the tokenizer's own",
        "sequence": f"{shown['seq_length']:,} tokens in a run, unless --seq-length is given",
        "note": shown["note"],
    }
    yield from (f"  {label:<9} {value}" for label, value in facts.items() if value)
    yield ""
    yield "  config.json"
    yield from (f"    {key} = {_short(value)}" for key, value in shown["config"].items())
    yield ""
    model = {f"model.{key}": value for key, value in shown["model"].items() if value is not None}
    yield from (f"  {line}".rstrip() for line in toml(model).splitlines())


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_short(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"{len(value)} numbers, {value[0]} to {value[-1]}"
    return str(value).lower() if isinstance(value, bool) else str(value)
