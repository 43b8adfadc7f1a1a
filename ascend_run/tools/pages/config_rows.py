"""The resolved config as rows: section, key, value as TOML, and origin."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs


@attrs.frozen
class ConfigRow:
    """One key of the configuration."""

    section: str
    key: str
    value: str
    origin: str = ""
    """``demo.toml:12``, ``command line``, ``default`` ...; empty if unknown."""

    @property
    def name(self) -> str:
        """``section.key``."""
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def is_set(self) -> bool:
        """Whether the user set it; not a default of ascend-run, a plugin or Megatron."""
        return bool(self.origin) and self.origin.split()[-1] != "default"


def config_rows(
    config: Mapping[str, Any], text: str, origins: Mapping[str, object]
) -> tuple[ConfigRow, ...]:
    """Every key, in file order.

    Args:
        config: The parsed file.
        text: Text of the file, in which a comment after a value is its origin.
        origins: ``section.key`` -> origin, if known; takes precedence over comments.
    """
    comments = _comments(text) if config else {}
    rows = []
    for section, key, value in _leaves(config, ""):
        row = ConfigRow(section, key, shown_value(value))
        origin = origins.get(row.name, comments.get(row.name, ""))
        rows.append(attrs.evolve(row, origin=str(origin)))
    return tuple(rows)


def _leaves(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, str, object]]:
    tables = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            tables.append((f"{prefix}.{key}" if prefix else key, value))
        else:
            yield prefix, key, value
    for name, value in tables:
        yield from _leaves(value, name)


def _comments(text: str) -> dict[str, str]:
    """``section.key`` -> the comment on its line."""
    comments: dict[str, str] = {}
    section = ""
    for line in text.split("\n"):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = header[1].replace('"', "").strip()
        elif "=" in line and (comment := _comment(line)):
            key = line.partition("=")[0].strip().strip("\"'")
            comments[f"{section}.{key}" if section else key] = comment
    return comments


def _comment(line: str) -> str:
    """The text after the first ``#`` that is not part of the value."""
    for found in re.finditer("#", line):
        try:
            tomllib.loads(line[: found.start()])
        except ValueError:
            continue
        return line[found.end() :].strip()
    return ""


def shown_value(value: Any) -> str:
    """Format a value as TOML; None, which TOML does not have, as ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {shown_value(item)}' for key, item in value.items())}}}"
    return str(value)
