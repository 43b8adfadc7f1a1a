"""What a user wrote, before it is checked: every value with its origin."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.plugin_api.config import DEFAULT_FAMILY, DEFAULT_PLATFORM, DEFAULT_TASK
from ascend_run.plugin_api.errors import ConfigError

from .value_types import TypeMismatch, describe, is_list, may_be_text, show, structure

COMMAND_LINE: Final = "command line"


def parse_text(text: str) -> Any:
    """A word of a command line: a TOML value, or the text itself where it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return parsed["value"] if parsed.keys() == {"value"} else text.strip()


@attrs.frozen
class Given:
    """One value, as it was written."""

    value: Any
    origin: str
    """``demo.toml:12``, ``command line`` ..."""
    text: str | None = None
    """On a command line, which has no quotes: the text that ``value`` was parsed from."""

    def structured(self, expected: Any, name: str) -> Any:
        """The value as a type has it.

        Text from a command line may also be what a shell makes it easy to write: an unquoted
        string, ``True``, and ``a,b`` for a list.

        Raises:
            TypeMismatch: It is of another type.
        """
        if self.text is None:
            return structure(self.value, expected, name)
        candidates = [self.value]
        if may_be_text(expected):
            is_table = isinstance(self.value, list | dict)
            candidates = [self.value, self.text] if is_table else [self.text, self.value]
        elif is_list(expected):
            parts = [part.strip() for part in self.text.split(",") if part.strip()]
            candidates += [parts, [parse_text(part) for part in parts]]
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
    """A file with the overrides of a command line on top.

    Raises:
        ConfigError: From the properties, where the value is of the wrong type.
    """

    values: Mapping[str, Given] = attrs.field(factory=dict)
    """``model.num_layers`` -> what was given."""
    problems: Sequence[str] = ()
    """What is wrong with the shape of what was written; told with the values' own problems."""
    level: int | None = None
    """``--level``: features up to this level come too."""
    disable: tuple[str, ...] = ()
    """``--disable``: features that do not come."""

    @property
    def enable(self) -> tuple[str, ...]:
        """Feature plugins, as the user named them."""
        return self._top("enable", tuple[str, ...], ())

    @property
    def platform(self) -> str:
        return self._top("platform", str, DEFAULT_PLATFORM)

    @property
    def task(self) -> str:
        return self._top("task", str, DEFAULT_TASK)

    @property
    def nproc(self) -> int:
        """Ranks to start on this machine."""
        return self._top("run.nproc", int, 1)

    @property
    def family(self) -> str:
        """Plugin of the model's family."""
        return self._top("model.family", str, DEFAULT_FAMILY)

    @property
    def hf_path(self) -> str | None:
        """Folder in Hugging Face's form that the model is taken from."""
        return self._top("model.hf_path", str | None, None)

    def replacing(self, origin: str, **values: Any) -> RawConfig:
        """The same with top-level values replaced, such as by ``--enable``; None replaces none."""
        new = {key: Given(value, origin) for key, value in values.items() if value is not None}
        return attrs.evolve(self, values={**self.values, **new})

    def _top(self, key: str, expected: Any, default: Any) -> Any:
        given = self.values.get(key)
        if given is None:
            return default
        try:
            return given.structured(expected, key)
        except TypeMismatch:
            raise ConfigError(
                "the config cannot be used",
                [f"{key}={show(given.value)}: expected {describe(expected)} ({given.origin})"],
            ) from None
