"""Data handlers: one source record to one typed sample. No torch.

A handler is a ``DataHandler`` under the entry-point group ``ascend_run.data_handlers``. Ours are
listed in ``setup.cfg``, as a third party's are in its own package; only the one that is named is
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from ascend_run.text.records import MalformedRecord, Record
from ascend_run.text.samples import Sample

__all__ = ["DataHandler", "Key", "MalformedRecord", "Record"]

GROUP = "ascend_run.data_handlers"


@attrs.frozen
class Key:
    """One key of a handler's schema."""

    name: str
    meaning: str
    required: bool = False
    default: str | None = None
    """The name in the source, where it is not the key's own: ``role_tag`` is ``from``."""


@attrs.frozen(kw_only=True)
class DataHandler:
    """Turns records of one schema into samples of one type."""

    name: str
    """The name of its entry point."""
    summary: str
    sample: type[Sample]
    keys: tuple[Key, ...]
    convert: Callable[[Record], Sample]
    """Raises MalformedRecord for a record that does not fit the schema."""
    any_of: tuple[tuple[str, ...], ...] = ()
    """Alternative sets of required keys; default: the keys that are required."""

    def lacking(self, columns: frozenset[str], keys: Mapping[str, str]) -> str | None:
        """Return which columns a table lacks, as a message; None if it has what is required."""
        required = tuple(key.name for key in self.keys if key.required)
        sets = [[keys.get(k, k) for k in names] for names in self.any_of or (required,)]
        if any(columns.issuperset(names) for names in sets):
            return None
        wanted = " or ".join(", ".join(map(repr, names)) for names in sets)
        return (
            f"its columns are {', '.join(map(repr, sorted(columns))) or 'none'}; the handler "
            f"{self.name!r} needs {wanted}; name another handler, or map the keys"
        )
