"""Whether a value from a file is of an option's type: strict, with words for what was expected.

A whole number stands for a fraction; beyond that nothing is converted, so that the text "3" is
not the number 3. Two spellings are added, since TOML has no null and no units: ``"none"`` for an
option that may be unset, and ``"1MiB"`` for a count of bytes (an option named ``..._bytes``).
"""

from __future__ import annotations

import enum
import functools
import math
import re
import reprlib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import cattrs

NONE: Final = "none"
_LARGEST: Final = 2**63 - 1
_LISTS: Final = (list, tuple, frozenset, set)
_SIZE: Final = re.compile(r"\s*(\d{1,15})\s*([KMGT]i?)?B\s*", re.ASCII)
_SIZE_UNITS: Final[Mapping[str | None, int]] = {
    None: 1,
    **{prefix: 1000 ** (i + 1) for i, prefix in enumerate("KMGT")},
    **{f"{prefix}i": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")},
}
_WORDS: Final[Mapping[Any, tuple[str, str]]] = {
    bool: ("true or false", "trues or falses"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    NoneType: (f'"{NONE}"', f'"{NONE}"'),
    Any: ("a value", "values"),
}


class TypeMismatch(Exception):
    """A value is not of an option's type; the message is what was expected."""


def structure(value: Any, expected: Any, name: str = "") -> Any:
    """The value as the type has it.

    Args:
        value: What tomllib and a YAML loader give: scalars, lists, tables.
        expected: A typing object.
        name: Of the option; one that ends in ``_bytes`` takes sizes.

    Raises:
        TypeMismatch: It is of another type.
    """
    if name.endswith("_bytes") and int in _members(expected) and isinstance(value, str):
        value = parse_size(value)
    if _spells_none(value, expected):
        return None
    try:
        return _converter().structure(value, expected)
    except RecursionError:
        raise
    except Exception as error:  # cattrs lets through whatever a type's own constructor raises
        wanted = describe(expected)
        if isinstance(value, float) and not math.isfinite(value):
            wanted += " that is finite"
        if name.endswith("_bytes"):
            wanted += ' of bytes or a size such as "1MiB"'
        raise TypeMismatch(wanted) from error


def may_be_text(expected: Any) -> bool:
    """Whether a string is of this type."""
    return any(
        member is str or (get_origin(member) is Literal and isinstance(get_args(member)[0], str))
        for member in _members(expected)
    )


def is_list(expected: Any) -> bool:
    """Whether a list, but no string, is of this type."""
    return not may_be_text(expected) and any(
        get_origin(member) in _LISTS for member in _members(expected)
    )


def parse_size(text: str) -> int | str:
    """The number of bytes that a size such as ``1MiB`` or ``64 KB`` means; other text as it is."""
    match = _SIZE.fullmatch(text)
    return int(match[1]) * _SIZE_UNITS[match[2]] if match else text


def show(value: Any) -> str:
    """A value in an error message: as TOML spells it, and short."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) > _LARGEST:
        return "a very large number"
    return reprlib.repr(list(value) if isinstance(value, tuple) else value)


def describe(expected: Any) -> str:
    """A type in words: ``a whole number``, ``one of 'bf16', 'fp16'``, ``a list of strings``."""
    if expected in _WORDS:
        return _WORDS[expected][0]
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        return " or ".join(describe(member) for member in arguments)
    if origin is Literal:
        return _one_of(arguments)
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return _one_of([member.value for member in expected])
    if origin is tuple and arguments[-1] is not Ellipsis:
        members = ", ".join(describe(member) for member in arguments)
        return f"a list of {len(arguments)} ({members})"
    if origin in _LISTS:
        return f"a list of {_WORDS.get(arguments[0], ('', 'values'))[1]}"
    if origin is dict or origin is Mapping:
        return "a table"
    return f"a {getattr(expected, '__name__', expected)}"


def _one_of(choices: Any) -> str:
    return "one of " + ", ".join(repr(choice) for choice in choices)


def _members(expected: Any) -> tuple[Any, ...]:
    return get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)


def _spells_none(value: Any, expected: Any) -> bool:
    members = _members(expected)
    choices = [c for member in members if get_origin(member) is Literal for c in get_args(member)]
    return NoneType in members and value == NONE and NONE not in choices


def _truth(value: Any, _: Any) -> bool:
    if type(value) is not bool:
        raise TypeError
    return value


def _whole(value: Any, kind: type[int]) -> int:
    if issubclass(kind, enum.Enum):  # a hook serves its class's subclasses too
        return kind(value)
    if type(value) is not int or abs(value) > _LARGEST:
        raise TypeError
    return value


def _number(value: Any, _: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _text(value: Any, kind: type[str]) -> str:
    if issubclass(kind, enum.Enum):
        return kind(value)
    if type(value) is not str or "\0" in value:
        raise TypeError
    value.encode()  # what cannot be encoded could not be written to the run's folder either
    return value


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
    converter.register_structure_hook(bool, _truth)
    converter.register_structure_hook(int, _whole)
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
        arguments = get_args(expected)
        kind = get_origin(expected)
        is_fixed = kind is tuple and arguments[-1] is not Ellipsis

        def hook(value: Any, _: Any) -> Any:
            if not isinstance(value, list | tuple):
                raise TypeError
            if is_fixed and len(value) != len(arguments):
                raise TypeError
            types = arguments if is_fixed else [arguments[0]] * len(value)
            return kind(
                converter.structure(member, of) for member, of in zip(value, types, strict=True)
            )

        return hook

    converter.register_structure_hook_factory(
        lambda expected: get_origin(expected) in (Union, UnionType), union_hook
    )
    converter.register_structure_hook_factory(
        lambda expected: get_origin(expected) in _LISTS, list_hook
    )
    return converter
