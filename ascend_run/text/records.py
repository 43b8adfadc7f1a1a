"""One record of a source, with its keys renamed and its values checked. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from .sources.unicode_text import lone_surrogate

_MOST_SHOWN: Final = 80
"""Characters."""


class MalformedRecord(Exception):
    """A record cannot be used; the message gives the reason, without its file and row."""


def shortened(value: object) -> str:
    """Return the beginning of a value, for messages."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


@attrs.frozen
class Record:
    """The values of one record, by the handler's names of them.

    Args:
        values: As read from the source.
        keys: The handler's key -> the key in the source, where the two differ.
    """

    values: Mapping[str, Any]
    keys: Mapping[str, str] = MappingProxyType({})

    def own(self, key: str) -> str:
        """Return the key in the source."""
        return self.keys.get(key, key)

    def __contains__(self, key: str) -> bool:
        return self.own(key) in self.values

    def get(self, key: str) -> Any:
        """Return a value; None if it is missing."""
        return self.values.get(self.own(key))

    def require(self, key: str) -> None:
        """Raise MalformedRecord if a key is missing."""
        if key not in self:
            raise MalformedRecord(f"lacks {self.own(key)!r}; its keys: {self.names()}")

    def text(self, key: str) -> str:
        """Return a string.

        Raises:
            MalformedRecord: It is missing, or another type.
        """
        self.require(key)
        own = self.own(key)
        value = self.values[own]
        if not isinstance(value, str):
            raise MalformedRecord(f"{own!r} must be a string, found {type(value).__name__}")
        return value

    def optional_text(self, key: str) -> str:
        """Return a string; the empty one if it is missing, null or empty."""
        return self.text(key) if self.get(key) else ""

    def listed(self, key: str, what: str) -> list[Any]:
        """Return a list, which a table of text columns holds as JSON; empty if it is missing.

        Args:
            what: What the list holds, for the message.

        Raises:
            MalformedRecord: It is neither a list nor the JSON text of one.
        """
        value = self.parsed(key)
        if value is None or value == "":
            return []
        if not isinstance(value, list):
            found = type(value).__name__
            if isinstance(value, str):
                found = f"text that is no JSON: {shortened(value)}"
            raise MalformedRecord(
                f"{self.own(key)!r} must be a list of {what}, found {found}; correct it, or leave "
                "it out"
            )
        return value

    def parsed(self, key: str) -> Any:
        """Return a value; a string that holds a JSON list or object is parsed.

        Raises:
            MalformedRecord: That JSON has half a character.
        """
        value = self.get(key)
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            try:
                parsed = json.loads(value)
                half = lone_surrogate(value, parsed)
            except (ValueError, RecursionError):
                return value
            if half:
                raise MalformedRecord(f"{self.own(key)!r} {half}")
            return parsed
        return value

    def names(self) -> str:
        """Return the keys of the source, for messages."""
        return ", ".join(map(repr, sorted(self.values))) or "none"
