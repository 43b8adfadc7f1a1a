"""Read the ``plan.json`` of any version into the records of a plan."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias, get_args, get_origin

import attrs
import cattrs

from ascend_run.prepare.plan.records import Plan

_Structure: TypeAlias = Callable[[object, Any], Any]
"""Converts a JSON value to a type, or raises TypeError."""
_Reader: TypeAlias = Callable[[_Structure, object, Any], Any]
_EMPTY: Final[tuple[object, ...]] = ("", (), {})
"""One of these is the value of a required field that a file lacks; a number has no such value."""


def read_plan(values: object) -> Plan:
    """Build a plan from JSON values of any version; unknown keys are ignored.

    A field that is missing or of the wrong type is empty, or has its default. A member of a list or
    table that is of the wrong type is left out, and so is one that lacks a number.
    """
    plan: Plan = _converter().structure(values if isinstance(values, Mapping) else {}, Plan)
    return plan


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    converter.register_structure_hook(str, _text)
    converter.register_structure_hook(int, _integer)
    readers: tuple[tuple[Callable[[Any], bool], _Reader], ...] = (
        (attrs.has, _record),
        (lambda expected: get_origin(expected) is types.UnionType, _optional),
        (lambda expected: get_origin(expected) is tuple, _tuple),
        (lambda expected: get_origin(expected) is Mapping, _table),
    )
    for matches, reader in readers:
        hook = functools.partial(reader, converter.structure)
        converter.register_structure_hook_func(matches, hook)
    return converter


def _text(value: object, _: type) -> str:
    if isinstance(value, str | int | float):
        return str(value)
    raise TypeError


def _integer(value: object, _: type) -> int:
    if type(value) is int:
        return value
    raise TypeError


def _record(structure: _Structure, value: object, record: type) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError
    attrs.resolve_types(record)
    fields = {}
    for field in attrs.fields(record):
        candidates = [value[field.name]] if field.name in value else []
        if field.default is attrs.NOTHING:
            candidates += _EMPTY
        found = [*_structured(structure, candidates, field.type)]
        if found:
            fields[field.name] = found[0]
        elif field.default is attrs.NOTHING:
            raise TypeError
    return record(**fields)


def _optional(structure: _Structure, value: object, expected: Any) -> Any:
    kind, _ = get_args(expected)
    return next(_structured(structure, [value], kind), None)


def _tuple(structure: _Structure, value: object, expected: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return tuple(_structured(structure, value, get_args(expected)[0]))


def _table(structure: _Structure, value: object, expected: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    kind = get_args(expected)[1]
    return {
        str(key): member
        for key, given in value.items()
        for member in _structured(structure, [given], kind)
    }


def _structured(structure: _Structure, values: Iterable[object], expected: Any) -> Iterator[Any]:
    """Yield the values that have the expected type, converted."""
    for value in values:
        try:
            yield structure(value, expected)
        except TypeError:
            continue
