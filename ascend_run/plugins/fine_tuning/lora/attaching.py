"""How a module comes to have an adapter below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Offsets: TypeAlias = tuple[tuple[int, int, int], ...]
"""As in Megatron: (axis, index of the shard, number of shards) per axis."""


def add_adapter(module: Any, adapter: Any) -> None:
    """Add an adapter as the module's ``adapter``, which checkpoints save in its own form."""
    module.add_module("adapter", adapter)
    inner: Callable[..., dict[str, object]] = module.sharded_state_dict

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, object] | None = None
    ) -> dict[str, object]:
        own = inner(prefix, sharded_offsets, metadata)
        below = f"{prefix}adapter."
        kept = {key: value for key, value in own.items() if not key.startswith(below)}
        ours: dict[str, object] = adapter.sharded_state_dict(below, sharded_offsets, metadata)
        return kept | ours

    vars(module)["sharded_state_dict"] = sharded_state_dict  # on this instance only
