"""Check that constructing a plugin has no side effects; it happens in every process and plan."""

from __future__ import annotations

from collections.abc import Iterator

from .subject import Subject

_OF_THE_CONTRACT = {"manifest", "config_class"}
_MUTABLE = (list, dict, set, bytearray)


def reentrant(subject: Subject) -> Iterator[str]:
    """Check that two instances share no mutable state."""
    subject.instance()  # the first instance may change class attributes once
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


def _class_attributes(plugin: type) -> dict[str, object]:
    """Attributes of the class and of its bases in the plugin's own package."""
    top = plugin.__module__.partition(".")[0]
    return {
        name: value
        for base in reversed(plugin.__mro__)
        if base.__module__.partition(".")[0] == top
        for name, value in vars(base).items()
        if not name.startswith("__") and name not in _OF_THE_CONTRACT
    }


def _instance_attributes(instance: object) -> dict[str, object]:
    slots = {
        name
        for base in type(instance).__mro__
        for name in getattr(base, "__slots__", ())
        if isinstance(name, str)
    }
    held = {name: getattr(instance, name) for name in slots if hasattr(instance, name)}
    return held | dict(getattr(instance, "__dict__", {}))
