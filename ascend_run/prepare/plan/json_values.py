"""The JSON values of a plan. No torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import cattrs

from .records import Plan


def plan_values(plan: Plan) -> dict[str, Any]:
    """Return the contents of ``plan.json``: dicts, lists, strings, numbers and booleans."""
    values: dict[str, Any] = _converter().unstructure(plan)
    return values


def plan_text(plan: Plan) -> str:
    """Return the text of ``plan.json``."""
    return json.dumps(plan_values(plan), indent=1)


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(unstruct_collection_overrides={tuple: list, Mapping: dict})
    converter.register_unstructure_hook_factory(
        attrs.has, lambda record: _record_writer(record, converter)
    )
    return converter


def _record_writer(record: type, converter: cattrs.Converter) -> Callable[[Any], dict[str, Any]]:
    """Return a function to a dict: fields in order, without optional ones that are None."""
    attrs.resolve_types(record)
    fields = [(field.name, field.type, field.default is None) for field in attrs.fields(record)]

    def write(value: Any) -> dict[str, Any]:
        found = ((name, getattr(value, name), kind, optional) for name, kind, optional in fields)
        return {
            name: converter.unstructure(member, kind)
            for name, member, kind, optional in found
            if not (optional and member is None)
        }

    return write
