"""Print a resolved config as a file that reproduces the run, with the origin of each value."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import attrs

from ascend_run.core.config.megatron_fields import megatron_fields
from ascend_run.core.run_files import RESOLVED_CONFIG_HEADER
from ascend_run.plugin_api.error_text import NONE

from .loading import ResolvedConfig
from .schema import DEFAULT_ORIGINS, SECTIONS, TOP_LEVEL


def render_toml(resolved: ResolvedConfig) -> str:
    """Return TOML of every value; Megatron's fields only if they are set.

    Omitted fields have the default of the installed Megatron, whose version the file states.
    """
    config = resolved.config
    lines = [
        RESOLVED_CONFIG_HEADER,
        f"# Fields that are not listed have the defaults of megatron-core {_megatron_version()}.",
        "",
    ]
    lines += _entries("", {key: getattr(config, key) for key in TOP_LEVEL}, resolved.origins)
    for section in SECTIONS[:-1]:
        lines += _table(section, getattr(config, section), resolved.origins)
    for plugin, options in config.plugins.items():
        lines += _table(f"plugins.{plugin}", options, resolved.origins)
    return "\n".join(lines) + "\n"


def _table(section: str, content: Any, origins: Mapping[str, str]) -> Iterator[str]:
    if not isinstance(content, Mapping):
        attributes = [attribute for attribute in attrs.fields(type(content)) if attribute.init]
        content = {attribute.name: getattr(content, attribute.name) for attribute in attributes}
    entries = list(_entries(f"{section}.", content, origins))
    if entries:
        yield from ("", f"[{section}]", *entries)


def _entries(
    prefix: str, content: Mapping[str, object], origins: Mapping[str, str]
) -> Iterator[str]:
    fields = megatron_fields() if prefix in ("model.", "parallel.") else {}
    for name, value in content.items():
        origin = origins[prefix + name]
        if origin in DEFAULT_ORIGINS and (value is None or name in fields):
            continue  # TOML has no null, and Megatron has about two hundred fields
        yield f"{name} = {_toml(NONE if value is None else value)}  # {_printable(origin)}"


def _toml(value: object) -> str:
    """Format a value on one line."""
    if isinstance(value, enum.Enum):
        return _toml(value.value)
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(member) for member in value)}]"
    if isinstance(value, Mapping):
        members = ", ".join(f"{_string(str(key))} = {_toml(v)}" for key, v in value.items())
        return f"{{ {members} }}" if members else "{}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        return repr(value)
    return _string(str(value))


def _string(text: str) -> str:
    escaped = "".join(
        character if character.isprintable() else f"\\U{ord(character):08X}"
        for character in text.replace("\\", "\\\\").replace('"', '\\"')
    )
    return f'"{escaped}"'


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _megatron_version() -> str:
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return "(a source tree)"
