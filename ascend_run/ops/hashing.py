"""Arithmetic of fingerprints: which elements are sampled, and how they are hashed to 64 bits.

All arithmetic is unsigned, modulo 2^64. Each sampled element is hashed with its position, and the
hashes are summed, so the sum depends neither on the order nor on the sharding.

Source of the mixing function: Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014 (SplitMix64), as finalised by Stafford's variant 13.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]

SAMPLES: Final = 64
"""Number of sampled elements per tensor; smaller tensors are sampled in full."""
MASK: Final = 2**64 - 1
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_NONE: Final = 0x6E6F7468696E6721
"""Encodes a missing value."""


def mix(words: Words) -> Words:
    """Mix bits: every output bit depends on every input bit. A bijection on 64-bit words."""
    words = words + _GAMMA
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def key_of(name: str) -> int:
    """Return a 64-bit key of a global tensor's name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def sampled_places(name: str, shape: Sequence[int]) -> NDArray[np.int64]:
    """Return the sampled row-major positions of a global tensor, ascending.

    They are equal for every run and rank.
    """
    count = math.prod(shape)
    if count <= SAMPLES:
        return np.arange(count, dtype=np.int64)
    draws = np.arange(SAMPLES, dtype=np.uint64) + np.uint64(key_of(name))
    return np.unique((mix(draws) % np.uint64(count)).astype(np.int64))


def salts(name: str, places: NDArray[np.int64]) -> Words:
    """Return a salt for each position of a tensor, distinct for every element of the model."""
    return mix(mix(places.astype(np.uint64)) ^ np.uint64(key_of(name)))


def hash_elements(bits: NDArray[Any], salt: Words) -> Words:
    """Return the sum of the hashes of each row's elements.

    Args:
        bits: Bits of the elements, [steps, elements], signed integers of any width.
        salt: [elements].

    Returns:
        [steps].
    """
    words = bits.astype(np.int64).view(np.uint64)
    hashed: Words = mix(words ^ salt).sum(axis=1, dtype=np.uint64)
    return hashed


def float_bits(value: float | None) -> int:
    """Return the bits of a float64; None has its own code, and all NaNs are equal."""
    if value is None:
        return _NONE
    if math.isnan(value):
        value = math.nan
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def combine(*parts: int | None) -> int:
    """Combine several words into one; order matters."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = mix(state ^ np.uint64(_NONE if part is None else part))
    return int(state[0])
