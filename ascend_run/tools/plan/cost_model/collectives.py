"""Communication of the estimate: replaced by plugins', in shares, merged. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import attrs

from ascend_run.plugin_api.contracts import Communication


def replaces(new: Communication, plain: Communication, names: Iterable[str]) -> bool:
    """Return whether a plugin's communication replaces that of the plain model, which has these
    names."""
    is_its = (new.replaces, new.group) == (plain.operation, plain.group)
    return is_its and any(fnmatchcase(name, new.why) for name in names)


def replacement(plain: Communication, new: Communication) -> Communication:
    """Return what is sent instead: calls and bytes of ``new`` are for each of ``plain``."""
    return attrs.evolve(
        plain,
        operation=new.operation,
        calls=plain.calls * new.calls,
        sent_bytes=plain.sent_bytes * new.sent_bytes,
        largest_bytes=plain.largest_bytes * new.sent_bytes / new.calls,
        overlapped=new.overlapped,
    )


def share_of(share: float, sent: Communication) -> Communication:
    """Return what is sent in a share of the forwards, or of the layers."""
    return attrs.evolve(sent, calls=sent.calls * share, sent_bytes=sent.sent_bytes * share)


def merged(communication: Sequence[Communication]) -> tuple[Communication, ...]:
    """Merge entries of the same operation, group and reason."""
    found: dict[object, Communication] = {}
    for collective in communication:
        key = collective.operation, collective.group, collective.why, collective.overlapped
        known = found.get(key)
        found[key] = (
            collective
            if known is None
            else attrs.evolve(
                known,
                calls=known.calls + collective.calls,
                sent_bytes=known.sent_bytes + collective.sent_bytes,
                largest_bytes=_largest(known, collective),
            )
        )
    return tuple(found.values())


def _largest(*merging: Communication) -> float:
    """0 if all calls have equal sizes."""
    sizes = [one.largest_bytes or one.sent_bytes / one.calls for one in merging if one.calls]
    known = any(collective.largest_bytes for collective in merging)
    return max(sizes) if known or len({*sizes}) > 1 else 0.0
