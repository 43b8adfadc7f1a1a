"""Find a data handler by its name, and read the mapping of its keys. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points

from ascend_run.plugin_api import ConfigError, PluginLoadError

from . import GROUP, DataHandler


def handler_names() -> list[str]:
    """Return the names of all installed handlers; imports none."""
    return sorted(entry_points(group=GROUP).names)


def load_handler(name: str) -> DataHandler:
    """Import one handler.

    Raises:
        ConfigError: There is no handler of that name; lists those that exist.
        PluginLoadError: It is provided more than once, fails to import, or is none.
    """
    found = {(_owner(point), point.value): point for point in entry_points(group=GROUP, name=name)}
    if not found:
        raise ConfigError(
            f"there is no data handler {name!r}; installed are {', '.join(handler_names())}"
        )
    if len(found) > 1:
        owners = " and ".join(f"{owner} ({value})" for owner, value in sorted(found))
        raise PluginLoadError(
            f"the data handler {name!r} is provided more than once, by {owners}; uninstall all "
            "but one"
        )
    (point,) = found.values()
    try:
        handler = point.load()
    except Exception as error:  # third-party code may raise anything
        raise PluginLoadError(
            f"the data handler {name!r} of {_owner(point)} fails to import {point.value}: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    if not isinstance(handler, DataHandler) or handler.name != name:
        raise PluginLoadError(
            f"the data handler {name!r} of {_owner(point)}: {point.value} is not a DataHandler of "
            "that name"
        )
    return handler


def _owner(point: EntryPoint) -> str:
    return "an unknown distribution" if point.dist is None else point.dist.name


def key_mapping(handler: DataHandler, given: Iterable[str]) -> Mapping[str, str]:
    """Return the handler's key -> the key in the source, from what the user gave.

    Args:
        given: Each ``KEY=NAME``, or a JSON object of them; the names under ``tags`` in an object
            count as its own.

    Raises:
        ConfigError: An entry is malformed, or the handler has no such key; lists all problems.
    """
    known = [key.name for key in handler.keys]
    mapping = {key.name: key.default for key in handler.keys if key.default is not None}
    problems: list[str] = []
    for entry in given:
        for name, own in _pairs(entry, problems):
            if name not in known:
                problems.append(
                    f"{name!r} is no key of the handler {handler.name!r}; its keys are "
                    f"{', '.join(known)}"
                )
            elif not isinstance(own, str) or not own:
                problems.append(f"{name!r} is mapped to {own!r}; name a key of the source")
            else:
                mapping[name] = own
    if problems:
        raise ConfigError("these keys cannot be mapped", problems)
    return mapping


def _pairs(entry: str, problems: list[str]) -> Iterator[tuple[str, object]]:
    if not entry.lstrip().startswith("{"):
        name, equals, own = entry.partition("=")
        if equals:
            yield name.strip(), own.strip()
        else:
            problems.append(f"{entry!r}: expected KEY=NAME, or a JSON object of names")
        return
    try:
        values = json.loads(entry)
    except (ValueError, RecursionError) as error:
        problems.append(f"{entry!r} is not a JSON object: {error}")
        return
    tags = values.pop("tags", {})
    yield from values.items()
    if isinstance(tags, dict):
        yield from tags.items()
    else:
        problems.append(f"'tags' must be a JSON object, found {tags!r}")
