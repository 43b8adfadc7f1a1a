"""The record of collectives or sends of one size."""

from __future__ import annotations

from ascend_run.plugin_api.contracts import Communication


def volume(
    operation: str, group: str, calls: float, nbytes: float, why: str, *, overlapped: bool = False
) -> Communication:
    """Collectives or sends of ``nbytes`` each."""
    return Communication(
        operation=operation,
        group=group,
        calls=calls,
        sent_bytes=calls * nbytes,
        why=why,
        overlapped=overlapped,
    )
