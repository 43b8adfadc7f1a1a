"""A call of an operator as data: each argument by kind, shape, dtype and layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

_SCALARS = {bool: "bool", int: "int", float: "float", str: "str", torch.dtype: "ScalarType"}


@attrs.frozen
class Value:
    """One argument."""

    kind: str
    """``Tensor``, ``int``, ``float``, ``bool``, ``str``, ``ScalarType``, ``Device``, ``None``, or
    one of these followed by ``[]``; an empty list is ``[]``."""
    content: Any = None
    """The value of a scalar; None for other kinds. A device is that of the machine."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    strides: tuple[int, ...] = ()
    items: tuple[Value, ...] = ()
    """The items of a list."""

    @classmethod
    def of(cls, value: Any) -> Value:
        """Describe a Python value.

        Raises:
            TypeError: No operator takes such a value.
        """
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            return cls("Tensor", shape=(*value.shape,), dtype=dtype, strides=value.stride())
        if value is None:
            return cls("None")
        if isinstance(value, torch.device):
            return cls("Device")
        if (kind := _SCALARS.get(type(value))) is not None:
            return cls(kind, str(value) if kind == "ScalarType" else value)
        if isinstance(value, Sequence):
            items = tuple(cls.of(item) for item in value)
            kinds = {item.kind for item in items}
            if len(kinds) > 1:
                raise TypeError(f"a list of {sorted(kinds)} is no argument of an operator")
            return cls(f"{''.join(kinds)}[]", items=items)
        raise TypeError(f"{type(value).__name__} is no argument of an operator")

    def rebuilt(self, device: torch.device) -> Any:
        """Build an argument with the same description; the contents of tensors are not stored."""
        if self.kind == "Tensor":
            dtype = getattr(torch, self.dtype)
            return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)
        if self.kind.endswith("[]"):
            return [item.rebuilt(device) for item in self.items]
        if self.kind == "Device":
            return device
        if self.kind == "ScalarType":
            return getattr(torch, self.content.removeprefix("torch."))
        return self.content


@attrs.frozen
class Call:
    """One call as written in the source: positional and keyword arguments."""

    operator: str
    positional: tuple[Value, ...]
    by_name: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        by_name = tuple((name, Value.of(value)) for name, value in sorted(kwargs.items()))
        return cls(operator, tuple(Value.of(value) for value in args), by_name)

    @property
    def named(self) -> dict[str, Value]:
        return dict(self.by_name)

    def forms(self) -> set[str]:
        """Return what a schema check depends on: the kinds of the arguments, and each string.

        Sizes do not matter. A string with a digit is the name of a communicator and is left out.
        """
        named = {name: value.kind for name, value in self.by_name if value.kind != "None"}
        kinds = [value.kind for value in self.positional]
        given = [*enumerate(self.positional), *self.by_name]
        words = {
            f"{place}={value.content!r}"
            for place, value in given
            if value.kind == "str" and not any(letter.isdigit() for letter in value.content)
        }
        return {f"{self.operator} {text}" for text in (f"{kinds} {named}", *words)}

    def to_json(self) -> dict[str, object]:
        positional = [attrs.asdict(value, filter=_says_something) for value in self.positional]
        named = {name: attrs.asdict(v, filter=_says_something) for name, v in self.by_name}
        return {"operator": self.operator, "positional": positional, "named": named}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Call:
        by_name = tuple((name, _value(value)) for name, value in data["named"].items())
        return cls(data["operator"], tuple(_value(v) for v in data["positional"]), by_name)


def _says_something(attribute: attrs.Attribute[Any], value: object) -> bool:
    if attribute.name == "content":
        return value is not None  # an empty string is a value
    return value not in ((), "")


def _value(data: Mapping[str, Any]) -> Value:
    whole = {name: data.get(name, ()) for name in ("shape", "strides")}
    items = tuple(_value(item) for item in data.get("items", ()))
    sizes = {name: tuple(value) for name, value in whole.items()}
    content = data.get("content")
    return Value(data["kind"], content, dtype=data.get("dtype", ""), items=items, **sizes)
