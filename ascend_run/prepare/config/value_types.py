"""Check that a value has an option's type, and describe expected types.

Strict: an integer is accepted as a float, nothing else is converted, so the text "3" is not the
number 3. TOML has no null and no units, so two spellings are added: ``"none"`` for an option that
may be unset, and ``"1MiB"`` for a byte count (an option named ``..._bytes``).
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import cattrs

from ascend_run.plugin_api.error_text import LARGEST, NONE, show

_LISTS: Final = (list, tuple, frozenset, set, Sequence)
_SIZE: Final = re.compile(r"\s*(\d{1,15})\s*([KMGT]i?)?B\s*", re.ASCII)
_SIZE_UNITS: Final[Mapping[str | None, int]] = {
    None: 1,
    **{prefix: 1000 ** (i + 1) for i, prefix in enumerate("KMGT")},
    **{f"{prefix}i": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")},
}
_WORDS: Final[Mapping[object, tuple[str, str]]] = {
    bool: ("true or false", "true or false values"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    NoneType: (f'"{NONE}"', f'"{NONE}"'),
    Any: ("a value", "values"),
}


class TypeMismatch(Exception):
    """A value has the wrong type; the message describes the expected type."""


def structure(value: Any, expected: Any, name: str = "") -> Any:
    """Convert a value to a type.

    Args:
        value: Output of tomllib or a YAML loader: scalars, lists, tables.
        expected: A typing object.
        name: Option name; names that end in ``_bytes`` accept sizes.

    Raises:
        TypeMismatch: The value has another type.
    """
    if name.endswith("_bytes") and int in _members(expected) and isinstance(value, str):
        value = parse_size(value)
    if _spells_none(value, expected):
        return None
    try:
        return _converter().structure(value, expected)
    except RecursionError:
        raise
    except Exception as error:  # cattrs passes on exceptions of a type's constructor
        wanted = describe(expected)
        if isinstance(value, float) and not math.isfinite(value):
            wanted += " that is finite"
        if name.endswith("_bytes"):
            wanted += ' of bytes or a size such as "1MiB"'
        if _is_member(value, expected):
            wanted += f"; write [{show(value)}]"
        raise TypeMismatch(wanted) from error


def may_be_text(expected: Any) -> bool:
    """Return whether the type accepts a string."""
    return any(
        member is str or (get_origin(member) is Literal and isinstance(get_args(member)[0], str))
        for member in _members(expected)
    )


def is_list(expected: Any) -> bool:
    """Return whether the type accepts a list but not a string."""
    return not may_be_text(expected) and any(
        _list_kind(member) is not None for member in _members(expected)
    )


def parse_size(text: str) -> int | str:
    """Convert a size such as ``1MiB`` or ``64 KB`` to bytes; return other text unchanged."""
    match = _SIZE.fullmatch(text)
    return int(match[1]) * _SIZE_UNITS[match[2]] if match else text


def describe(expected: Any) -> str:
    """Describe a type: ``a whole number``, ``one of 'bf16', 'fp16'``, ``a list of strings``."""
    if expected in _WORDS:
        return _WORDS[expected][0]
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        return " or ".join(describe(member) for member in arguments)
    if origin is Literal:
        return _one_of(arguments)
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return _one_of([member.value for member in expected])
    if origin is tuple and arguments[-1:] != (Ellipsis,):
        members = ", ".join(describe(member) for member in arguments)
        return f"a list of {len(arguments)} ({members})"
    if _list_kind(expected) is not None:
        return f"a list of {_several(arguments[0] if arguments else Any)}"
    if origin is dict or origin is Mapping:
        return f"a table of {_several(arguments[1] if arguments else Any)}"
    return f"a {getattr(expected, '__name__', expected)}"


def _several(expected: Any) -> str:
    return _WORDS[expected][1] if expected in _WORDS else f"values, each {describe(expected)}"


def _one_of(choices: Any) -> str:
    return "one of " * (len(choices) > 1) + ", ".join(map(repr, choices))


def _members(expected: Any) -> tuple[object, ...]:
    return get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)


def _is_union(expected: object) -> bool:
    origin: Any = get_origin(expected)
    return origin in (Union, UnionType)


def _list_kind(expected: Any) -> Any:
    """Return the list type of an annotation, such as ``tuple`` for ``tuple[str, ...]``, or None."""
    kind = get_origin(expected) or expected
    return kind if kind in _LISTS else None


def _is_member(value: Any, expected: Any) -> bool:
    """Return whether a value would be valid as the single item of a list."""
    if isinstance(value, list | tuple) or not is_list(expected):
        return False
    try:
        _converter().structure([value], expected)
    except RecursionError:
        raise
    except Exception:  # as in structure: exceptions of a type's constructor
        return False
    return True


def _spells_none(value: object, expected: Any) -> bool:
    members = _members(expected)
    choices = [c for member in members if get_origin(member) is Literal for c in get_args(member)]
    return NoneType in members and value == NONE and NONE not in choices


def _boolean(value: Any, _: Any) -> bool:
    if type(value) is not bool:
        raise TypeError
    return value


def _integer(value: Any, kind: type[int]) -> int:
    if issubclass(kind, enum.Enum):  # a hook also serves subclasses
        return kind(value)
    if type(value) is not int or abs(value) > LARGEST:
        raise TypeError
    return value


def _number(value: Any, _: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _text(value: object, kind: type[str]) -> str:
    if issubclass(kind, enum.Enum):
        return kind(value)
    if type(value) is not str or "\0" in value:
        raise TypeError
    value.encode()  # text that cannot be encoded cannot be written to the run folder
    return value


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
    converter.register_structure_hook(bool, _boolean)
    converter.register_structure_hook(int, _integer)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(str, _text)

    def union_hook(expected: Any) -> Any:
        def hook(value: Any, _: Any) -> Any:
            for member in get_args(expected):
                if member is NoneType:
                    if value is None:
                        return None
                    continue
                try:
                    return converter.structure(value, member)
                except (TypeError, ValueError):
                    continue
            raise TypeError

        return hook

    def list_hook(expected: Any) -> Any:
        kind = _list_kind(expected)
        is_bare = expected is kind  # list, not list[int]
        arguments = (Any,) if is_bare else get_args(expected)
        is_fixed = kind is tuple and not is_bare and arguments[-1:] != (Ellipsis,)
        build = tuple if kind is Sequence else kind

        def hook(value: Any, _: object) -> Any:
            if not isinstance(value, list | tuple):
                raise TypeError
            if is_fixed and len(value) != len(arguments):
                raise TypeError
            types = arguments if is_fixed else [arguments[0]] * len(value)
            return build(
                converter.structure(member, of) for member, of in zip(value, types, strict=True)
            )

        return hook

    converter.register_structure_hook_factory(_is_union, union_hook)
    converter.register_structure_hook_factory(
        lambda expected: _list_kind(expected) is not None, list_hook
    )
    return converter
