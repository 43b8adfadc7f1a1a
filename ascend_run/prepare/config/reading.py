"""Read a config file and command-line overrides into one raw config."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import ConfigError

from .raw import COMMAND_LINE, RawConfig, RawValue, parse_text
from .schema import SECTIONS, TOP_LEVEL
from .toml_document import TomlProblem, parse_toml

_LARGEST_FILE_BYTES: Final = 2**18
_SUFFIXES: Final = (".toml", ".yaml", ".yml")


def read_raw(file: Path | None, overrides: Sequence[str] = ()) -> RawConfig:
    """Read a config; ``build_config`` checks its values.

    Args:
        file: TOML or YAML, by its suffix; None is an empty config.
        overrides: ``section.key=value``, the value as TOML or plain text. Later overrides win, and
            all override the file.

    Raises:
        ConfigError: The file cannot be read or parsed, or an override is malformed.
    """
    values: dict[str, RawValue] = {}
    problems: list[str] = []
    if file is not None:
        data, lines = _parse_file(Path(file))
        values, problems = _flatten(data, lines, Path(file).name)
    unreadable = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            unreadable.append(f"{override!r} is not an override; expected section.key=value")
            continue
        values[key.strip()] = RawValue(parse_text(text), COMMAND_LINE, text.strip())
    if unreadable:
        raise ConfigError("the command line cannot be used", unreadable)
    return RawConfig(file=file, values=values, problems=problems)


def raw_of_toml(text: str, name: str) -> RawConfig:
    """Parse a config written by ``render_toml``.

    Args:
        name: File name for the origins of its values.
    """
    values, problems = _flatten(*parse_toml(text), name)
    return RawConfig(values=values, problems=problems)


def _parse_file(file: Path) -> tuple[object, Mapping[tuple[str, ...], int]]:
    shown = repr(str(file))
    if file.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"{shown} is not a config file; expected a name ending in .toml or .yaml")
    parse, problem = _format(file.suffix.lower())
    try:
        with file.open("rb") as stream:
            content = stream.read(_LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read the config {shown}: {reason}") from None
    if len(content) > _LARGEST_FILE_BYTES:
        raise ConfigError(f"the config {shown} is larger than {_LARGEST_FILE_BYTES} bytes")
    try:
        result: tuple[Any, Mapping[tuple[str, ...], int]] = parse(
            content.decode("utf-8-sig").replace("\r\n", "\n")
        )
        return result
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config {shown} is not UTF-8: byte {error.start}") from None
    except problem as error:
        raise ConfigError(f"cannot read the config {shown}: {error}") from None
    except RecursionError:
        raise ConfigError(f"the config {shown} is nested too deeply") from None


def _format(suffix: str) -> tuple[Callable[[str], Any], type[Exception]]:
    """Return the parser of a file suffix and the exception it raises."""
    if suffix == ".toml":
        return parse_toml, TomlProblem
    # Imported late: most configs are TOML, and the YAML parser is the slowest import here.
    from .yaml_document import YamlProblem, parse_yaml

    return parse_yaml, YamlProblem


def _flatten(
    data: object, lines: Mapping[tuple[str, ...], int], file: str
) -> tuple[dict[str, RawValue], list[str]]:
    """Return values by full key, and problems of the structure."""
    if not isinstance(data, dict):
        return {}, [f"{file} must hold sections such as [model], not {show(data)}"]
    values: dict[str, RawValue] = {}
    problems: list[str] = []

    def origin(*path: str) -> str:
        while path:
            if path in lines:
                return f"{file}:{lines[path]}"
            path = path[:-1]
        return file

    def table(value: object, *path: str) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict):
            yield from value.items()
        elif value is not None:  # an empty section in YAML
            problems.append(
                f"{'.'.join(path)}={show(value)}: it is a section of options ({origin(*path)})"
            )

    for name, content in data.items():
        if name in TOP_LEVEL:
            values[name] = RawValue(content, origin(name))
        elif name == "plugins":
            for plugin, options in table(content, name):
                for key, value in table(options, name, plugin):
                    values[f"plugins.{plugin}.{key}"] = RawValue(value, origin(name, plugin, key))
        elif name in SECTIONS:
            for key, value in table(content, name):
                values[f"{name}.{key}"] = RawValue(value, origin(name, key))
        else:
            problems.append(f"unknown section {name!r}{nearest_section(name)} ({origin(name)})")
    return values, problems


def nearest_section(name: str) -> str:
    """Return ``; did you mean 'model'?``, or the list of sections."""
    known = [*TOP_LEVEL, *SECTIONS]
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
