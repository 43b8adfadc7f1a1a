"""What a ring sends and holds, by formula. No torch."""

from __future__ import annotations

import attrs

from ascend_run.ops.attention.kv_cache import KvCache

SUM_BYTES = 4
"""Of one number of a gradient's sum."""


@attrs.frozen(kw_only=True)
class Sends:
    """Messages of one kind in one pass of a layer."""

    calls: float
    nbytes: float
    """Of one of them."""
    why: str


@attrs.frozen(kw_only=True)
class Ring:
    """One pass of one layer forward and back, on one rank.

    Args:
        tokens: Of this rank, over the micro-batch.
        groups: Key-value heads.
        width: Of a key, and of a value.
        item_bytes: Of one number of them.
        size: Ranks of the whole ring.
        window: Ranks of one window; ``size`` in the plain ring.
    """

    tokens: float
    groups: float
    width: float
    item_bytes: float
    size: int
    window: int

    @property
    def key_bytes(self) -> float:
        """Of one rank's keys; its values have as many."""
        return self.tokens * self.groups * self.width * self.item_bytes

    @property
    def hops(self) -> tuple[int, int]:
        """Within windows, and from window to window; in forward."""
        windows = self.size // self.window
        return windows * (self.window - 1), windows - 1

    def sends(self, hops: int, kv_cache: KvCache) -> tuple[Sends, ...]:
        """What goes over one kind of hop, forward and backward."""
        keys, sums = self.key_bytes, 2 * self.key_bytes * SUM_BYTES / self.item_bytes
        back = {
            "none": [Sends(calls=hops, nbytes=2 * keys, why="keys and values, backward")],
            "half": [Sends(calls=hops, nbytes=keys, why="values, backward")],
            "full": [],
        }[kv_cache]
        return (
            Sends(calls=hops, nbytes=2 * keys, why="keys and values, forward"),
            *back,
            Sends(calls=hops, nbytes=sums, why="gradients of keys and values"),
        )

    def held_bytes(self, kv_cache: KvCache) -> float:
        """Of what was received, from forward to backward."""
        if kv_cache == "none":
            return 2 * self.key_bytes
        return (self.size + 1 if kv_cache == "half" else 2 * self.size) * self.key_bytes
