"""Names of the parts of linears that have a low-rank adapter of their own. No torch."""

from __future__ import annotations

from typing import Final

_SHARED: Final = "shared_experts"


def selectors(part: str) -> tuple[str, ...]:
    """Return the names that select a part of a linear in options, its own first.

    Shared experts are an MLP, so the names of an MLP's linears select theirs, too: of
    ``shared_experts_fc1_gate`` also ``shared_experts_fc1``, ``shared_experts``,
    ``linear_fc1_gate`` and ``linear_fc1``. Of other parts, this is their name alone.
    """
    if not part.startswith(f"{_SHARED}_"):
        return (part,)
    inner = part.removeprefix(f"{_SHARED}_")
    linear = inner.partition("_")[0]
    own = (part, f"{_SHARED}_{linear}", _SHARED)
    return tuple(dict.fromkeys((*own, f"linear_{inner}", f"linear_{linear}")))
