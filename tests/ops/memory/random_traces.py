"""What a program might allocate and free, in sizes of every kind of block."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
CHANGES: Final = 300


def random_trace(seed: int, pools: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield the number, size and pool of each block that is allocated, and of each that is freed,
    with size 0. Unit: bytes."""
    draws = random.Random(seed)
    held: dict[int, str] = {}
    for number in range(CHANGES):
        if held and draws.random() < 0.48:
            freed = draws.choice(sorted(held))
            yield freed, 0, held.pop(freed)
        else:
            limit = draws.choice((4 * KIB, MIB, 3 * MIB, 9 * MIB, 30 * MIB))
            size, held[number] = draws.randint(1, limit), draws.choice(pools)
            yield number, size, held[number]
