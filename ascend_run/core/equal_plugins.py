"""Check that all ranks run the same plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ascend_run.plugin_api.errors import PluginResolutionError

from .checkpoint.ranks import Ranks


def require_equal_plugins(lock: Mapping[str, object], ranks: Ranks) -> None:
    """Compare the plugins, their versions and their hashes over all ranks.

    Raises:
        PluginResolutionError: Raised on every rank; names each rank and plugin that differ from
            rank 0.
    """
    locks = ranks.gather(dict(lock))
    problems = ranks.broadcast(_differences(locks) if locks is not None else None)
    if problems:
        raise PluginResolutionError(
            "the ranks do not run the same plugins; install the same versions everywhere", problems
        )


def _differences(locks: Sequence[Mapping[str, object]]) -> list[str]:
    first = locks[0]
    return [
        f"rank {rank}: '{name}' is {_shown(other.get(name))}; rank 0: {_shown(first.get(name))}"
        for rank, other in enumerate(locks)
        for name in sorted(first.keys() | other.keys())
        if other.get(name) != first.get(name)
    ]


def _shown(entry: object) -> str:
    if not isinstance(entry, Mapping):
        return str(entry or "missing")
    return ", ".join(f"{key} {str(value)[:12]}" for key, value in sorted(entry.items()))
