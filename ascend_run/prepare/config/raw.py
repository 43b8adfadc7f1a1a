"""Unchecked user input: every value with its origin."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs

from ascend_run.core.hugging_face.json_files import model_type_of
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.types.config import DEFAULT_FAMILY, DEFAULT_PLATFORM, DEFAULT_TASK

from .value_types import TypeMismatch, describe, is_list, may_be_text, structure

COMMAND_LINE: Final = "command line"
T = TypeVar("T")
_TOML_MARKS: Final = ('"', "'", "[", "{")


def parse_text(text: str) -> Any:
    """Parse a command-line value as TOML; return the text itself if it is not TOML."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return parsed["value"] if parsed.keys() == {"value"} else text.strip()


@attrs.frozen
class RawValue:
    """One value as the user wrote it."""

    value: Any
    origin: str
    """``demo.toml:12``, ``command line`` and the like."""
    text: str | None = None
    """On a command line, the text that ``value`` was parsed from."""

    def structured(self, expected: Any, name: str) -> Any:
        """Convert the value to a type.

        Command-line text may also use shell-friendly spellings: an unquoted string, ``True``, and
        ``a,b`` for a list. Text with TOML quotes, brackets or braces is only parsed as TOML; these
        characters are never part of list items.

        Raises:
            TypeMismatch: The value has another type.
        """
        if self.text is None:
            return structure(self.value, expected, name)
        candidates = [self.value]
        if may_be_text(expected):
            is_table = isinstance(self.value, list | dict)
            candidates = [self.value, self.text] if is_table else [self.text, self.value]
        elif is_list(expected):
            parts = [part.strip() for part in self.text.split(",") if part.strip()]
            if not any(part.startswith(_TOML_MARKS) for part in parts):
                candidates += [parts, [parse_text(part) for part in parts]]
            elif self.value == self.text:
                raise TypeMismatch(f'{describe(expected)}; write a,b or \'["a", "b"]\'')
        if self.text in ("True", "False"):
            candidates.append(self.text == "True")
        for candidate in candidates[:-1]:
            try:
                return structure(candidate, expected, name)
            except TypeMismatch:
                continue
        return structure(candidates[-1], expected, name)


@attrs.frozen(kw_only=True)
class RawConfig:
    """A config file with command-line overrides.

    Raises:
        ConfigError: A property's value has the wrong type.
    """

    file: Path | None = None
    """The config file; None if there is none."""
    values: Mapping[str, RawValue] = attrs.field(factory=dict)
    """Values by full key, such as ``model.num_layers``."""
    problems: Sequence[str] = ()
    """Structural problems of the input, reported together with those of the values."""
    level: int | None = None
    """``--level``: enables features up to this level."""
    disable: tuple[str, ...] = ()
    """``--disable``: features to leave out."""

    @property
    def enable(self) -> tuple[str, ...]:
        """Feature plugins as the user named them."""
        return self._top("enable", tuple[str, ...], ())

    @property
    def enable_origin(self) -> str | None:
        """Where ``enable`` is set; None if it is not."""
        return self.values["enable"].origin if "enable" in self.values else None

    @property
    def platform(self) -> str:
        return self._top("platform", str, DEFAULT_PLATFORM)

    @property
    def task(self) -> str:
        return self._top("task", str, DEFAULT_TASK)

    @property
    def nproc(self) -> int:
        """Number of ranks to start on this machine."""
        return self._top("run.nproc", int, 1)

    @property
    def family(self) -> str:
        """Plugin of the model family; by default the ``model_type`` of the folder to load from."""
        if self.hf_path is None or "model.family" in self.values:
            return self._top("model.family", str, DEFAULT_FAMILY)
        return model_type_of(self.hf_path)

    @property
    def hf_path(self) -> str | None:
        """Hugging Face folder to load the model from."""
        return self._top("model.hf_path", str | None, None)

    def replacing(self, origin: str, **values: Any) -> RawConfig:
        """Return a copy with top-level values replaced; None keeps a value."""
        new = {key: RawValue(value, origin) for key, value in values.items() if value is not None}
        return attrs.evolve(self, values={**self.values, **new})

    def _top(self, key: str, expected: Any, default: T) -> T:
        given = self.values.get(key)
        if given is None:
            return default
        try:
            result: T = given.structured(expected, key)
        except TypeMismatch as mismatch:
            raise ConfigError(
                "the config cannot be used",
                [f"{key}={show(given.value)}: expected {mismatch} ({given.origin})"],
            ) from None
        return result
