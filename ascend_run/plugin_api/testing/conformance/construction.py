"""Constructing a plugin: done again in every process and for every plan, so it leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .subject import Subject

_OF_THE_CONTRACT = {"manifest", "config_class"}
_MUTABLE = (list, dict, set, bytearray)


def reentrant(subject: Subject) -> Iterator[str]:
    """Two instances share nothing that either can change."""
    subject.instance()  # what a first one does once is seen on the class below
    before = _class_attributes(subject.plugin)
    first, second = subject.instance(), subject.instance()
    after = _class_attributes(subject.plugin)
    for name in sorted({*before, *after}):
        if before.get(name) is not after.get(name):
            yield f"constructing it changes the class attribute '{name}'; keep it on the instance"
    for name, value in sorted(after.items()):
        if isinstance(value, _MUTABLE):
            yield (
                f"the class attribute '{name}' is a {type(value).__name__}, which all instances "
                "share; make it in __init__"
            )
    own, others = _instance_attributes(first), _instance_attributes(second)
    for name in sorted(own.keys() & others.keys()):
        if own[name] is others[name] and isinstance(own[name], _MUTABLE):
            yield (
                f"two instances share the {type(own[name]).__name__} '{name}'; make a new one in "
                "__init__"
            )


def _class_attributes(plugin: type) -> dict[str, Any]:
    """Those of the class and of the plugin's own bases."""
    top = plugin.__module__.partition(".")[0]
    return {
        name: value
        for base in reversed(plugin.__mro__)
        if base.__module__.partition(".")[0] == top
        for name, value in vars(base).items()
        if not name.startswith("__") and name not in _OF_THE_CONTRACT
    }


def _instance_attributes(instance: object) -> dict[str, Any]:
    slots = {
        name
        for base in type(instance).__mro__
        for name in getattr(base, "__slots__", ())
        if isinstance(name, str)
    }
    held = {name: getattr(instance, name) for name in slots if hasattr(instance, name)}
    return held | dict(getattr(instance, "__dict__", {}))
