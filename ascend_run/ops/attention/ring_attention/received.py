"""What the ring's forward leaves for its backward: keys and values, kept here or sent again."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_run.ops.attention.kv_cache import KvCache


class Received:
    """Keys and values step by step, each step's in a flat buffer, the keys first.

    Args:
        kv_cache: ``none``: the last step's stay, and go round again; ``half``: every step's keys
            stay, and the values go round; ``full``: everything stays, and nothing goes round.
        num_keys: Numbers in the keys of a buffer.
        num_steps: Of the ring.
        saved: What ``tensors`` gave in forward; none at its beginning.
    """

    def __init__(
        self, kv_cache: KvCache, *, num_keys: int, num_steps: int, saved: tuple[Tensor, ...] = ()
    ) -> None:
        self._kv_cache, self._num_keys = kv_cache, num_keys
        moving = 0 if kv_cache == "full" else 1
        self.moving: Tensor | None = saved[0] if saved and moving else None
        """What goes round in backward."""
        self._kept = [*saved[moving:]]
        self.num_tensors = moving + (0 if kv_cache == "none" else num_steps)

    def add(self, held: Tensor) -> None:
        """One more step of forward."""
        if self._kv_cache == "full":
            self._kept.append(held)
            return
        if self._kv_cache == "half":
            self._kept.append(held[: self._num_keys].clone())
        self.moving = held

    def tensors(self) -> list[Tensor]:
        """What backward needs, ``num_tensors`` of them."""
        if self.moving is None:
            return self._kept
        values = self.moving[self._num_keys :].clone() if self._kv_cache == "half" else self.moving
        return [values, *self._kept]

    def at(self, step: int) -> Tensor:
        """Keys and values of a step, in backward."""
        if self.moving is None:
            return self._kept[step]
        return (
            torch.cat((self._kept[step], self.moving)) if self._kv_cache == "half" else self.moving
        )
