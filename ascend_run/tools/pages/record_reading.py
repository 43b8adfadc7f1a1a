"""Read JSON or TOML values, of any version or damaged, into records."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias, TypeVar, get_args, get_origin

import attrs
import cattrs

from ascend_run.prepare.plan.records import Plan

_Record = TypeVar("_Record")
_Structure: TypeAlias = Callable[[object, Any], Any]
"""Converts a JSON value to a type, or raises TypeError."""
_Reader: TypeAlias = Callable[[_Structure, object, Any], Any]
_EMPTY: Final[tuple[object, ...]] = ("", (), {})
"""One of these is the value of a required field that a file lacks; a number has no such value."""


def read_record(values: object, record: type[_Record]) -> _Record:
    """Build a record from the values of a file; unknown keys are ignored.

    A field that is missing or of the wrong type is empty, or has its default. A member of a list or
    table that is of the wrong type is left out, and so is one that lacks a number.
    """
    found: _Record = _converter().structure(_mapping(values), record)
    return found


def read_plan(values: object) -> Plan:
    """Build a plan from the ``plan.json`` of any version; as ``read_record``."""
    return read_record(values, Plan)


def read_table(values: object, record: type[_Record]) -> Mapping[str, _Record]:
    """Build a table of records; a member that is no table of its own is left out."""
    structure = _converter().structure
    return {
        str(key): found
        for key, given in _mapping(values).items()
        for found in _structured(structure, [given], record)
    }


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    converter.register_structure_hook(str, _text)
    converter.register_structure_hook(int, _integer)
    converter.register_structure_hook(float, _number)
    readers: tuple[tuple[Callable[[Any], bool], _Reader], ...] = (
        (attrs.has, _record),
        (lambda expected: get_origin(expected) is types.UnionType, _optional),
        (lambda expected: get_origin(expected) is tuple, _tuple),
        (lambda expected: get_origin(expected) is Mapping, _table),
        (lambda expected: expected is object, lambda structure, value, expected: value),
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


def _number(value: object, _: type) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise TypeError


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


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
