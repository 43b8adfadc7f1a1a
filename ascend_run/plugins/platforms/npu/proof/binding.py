"""Check whether a schema takes a call, argument by argument, and bind the arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from .calls import Call, Value


@attrs.frozen
class Argument:
    """One parameter of an operator."""

    name: str
    type: str
    """Without the mark of an optional type."""
    optional: bool
    by_name_only: bool
    required: bool
    default: Any

    def takes(self, value: Value) -> bool:
        if value.kind == "None":
            return self.optional
        if value.kind == "[]":
            return self.type.startswith("List[")
        if value.kind.endswith("[]"):
            of_item = attrs.evolve(self, type=self.type.removeprefix("List[").removesuffix("]"))
            return self.type.startswith("List[") and all(of_item.takes(i) for i in value.items)
        return value.kind in _KINDS.get(self.type, ())


_KINDS: Mapping[str, tuple[str, ...]] = {
    "Tensor": ("Tensor",),
    "int": ("int", "bool", "ScalarType"),
    "SymInt": ("int", "bool"),
    "float": ("float", "int"),
    "bool": ("bool",),
    "str": ("str",),
    "number": ("float", "int", "bool"),
    "ScalarType": ("ScalarType", "int"),
    "Device": ("Device", "str"),
}
"""Type of a parameter -> kinds of values that torch's dispatcher converts to it."""


@attrs.frozen
class Schema:
    """The parameters of one operator."""

    name: str
    arguments: tuple[Argument, ...]


@functools.cache
def parse(schema: str) -> Schema:
    """Read a schema, ``npu_swiglu(Tensor input, int dim=-1) -> Tensor``."""
    parsed: Any = torch._C.parse_schema(f"npu::{schema.removeprefix('npu::')}")
    return Schema(
        schema.partition("(")[0].removeprefix("npu::"),
        tuple(_argument(argument) for argument in parsed.arguments),
    )


def _argument(argument: Any) -> Argument:
    spelled = str(argument.real_type)
    plain = spelled.removeprefix("Optional[").removesuffix("]")
    optional = spelled.startswith("Optional[")
    return Argument(
        name=argument.name,
        type=plain if optional else spelled,
        optional=optional,
        by_name_only=argument.kwarg_only,
        required=not argument.has_default_value(),
        default=argument.default_value,
    )


def bound(call: Call, schema: Schema) -> tuple[dict[str, Value], list[str]]:
    """Return (parameter name -> value in the call, everything that does not fit)."""
    problems: list[str] = []
    places = [argument for argument in schema.arguments if not argument.by_name_only]
    given = dict(zip((place.name for place in places), call.positional, strict=False))
    if len(call.positional) > len(places):
        problems.append(f"takes {len(places)} arguments by position, not {len(call.positional)}")
    by_name = {argument.name: argument for argument in schema.arguments}
    for name, value in call.named.items():
        if name not in by_name:
            problems.append(f"has no argument '{name}'")
        elif name in given:
            problems.append(f"is given '{name}' twice")
        else:
            given[name] = value
    for name, value in given.items():
        if not by_name[name].takes(value):
            wanted = f"{by_name[name].type}{'?' if by_name[name].optional else ''}"
            problems.append(f"takes {wanted} as '{name}', not {value.kind}")
    missing = [a.name for a in schema.arguments if a.required and a.name not in given]
    problems += [f"is not given '{name}'" for name in missing]
    return given, problems


def problems_of(call: Call, overloads: Sequence[Schema]) -> list[str]:
    """Return why no overload takes a call; empty if one does."""
    results = [bound(call, schema)[1] for schema in overloads]
    if not results:
        return ["is not there"]
    return min(results, key=len)


def chosen(call: Call, overloads: Sequence[Schema]) -> Schema | None:
    """Return the first overload that takes a call."""
    return next((schema for schema in overloads if not bound(call, schema)[1]), None)
