"""The arithmetic of fingerprints: fixed for ever, blind to order, awake to every bit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ascend_run.ops.hashing import (
    MASK,
    SAMPLES,
    combine,
    float_bits,
    hash_elements,
    mix,
    salts,
    sampled_places,
)

NAME = "decoder.layers.0.mlp.linear_fc1.weight"
PLACES = [63348, 75751, 103064, 108840]
HASH = "014e59732478c044"
COMBINED = "43c485407f83188a"


def by_hand(word: int) -> int:
    """SplitMix64's output function in Python's own integers."""
    word = (word + 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def test_words_are_mixed_as_the_paper_has_it() -> None:
    words = [0, 1, 2**63, MASK, 1234567]
    assert [int(w) for w in mix(np.array(words, np.uint64))] == [by_hand(w) for w in words]
    assert by_hand(0) == 0xE220A8397B1DCDAF, "the generator's published first word from seed 0"


def test_every_element_of_a_small_tensor_is_sampled() -> None:
    assert sampled_places(NAME, (4, 16)).tolist() == [*range(64)]
    assert sampled_places(NAME, ()).tolist() == [0]
    assert sampled_places(NAME, (3, 0)).tolist() == []


def test_a_sample_is_spread_over_a_large_tensor_and_depends_on_its_name() -> None:
    places = sampled_places(NAME, (1000, 1000))
    assert len(places) > SAMPLES - 4
    assert [*places] == sorted({*places.tolist()})
    assert 0 <= places[0] < 10**5
    assert 9 * 10**5 < places[-1] < 10**6
    assert {*places.tolist()} != {*sampled_places("another", (1000, 1000)).tolist()}


def test_what_is_sampled_and_hashed_never_changes_within_a_format() -> None:
    """While this holds, runs of different versions can be compared; else the format rises."""
    assert sampled_places(NAME, (1000, 1000))[:4].tolist() == PLACES
    bits = np.array([[1, -2, 3]], np.int32)
    (hashed,) = hash_elements(bits, salts(NAME, np.array([0, 5, 9])))
    assert f"{int(hashed):016x}" == HASH
    assert f"{combine(float_bits(1.5), float_bits(None), 7):016x}" == COMBINED


def test_parts_held_apart_and_in_any_order_add_up_to_the_whole() -> None:
    bits = np.arange(20, dtype=np.int64)[None]
    salt = salts(NAME, np.arange(20))
    whole = hash_elements(bits, salt)
    order = np.random.default_rng(0).permutation(20)
    first, second = order[:7], order[7:]
    parts = hash_elements(bits[:, first], salt[first]) + hash_elements(
        bits[:, second], salt[second]
    )
    assert parts == whole


def test_every_bit_of_every_element_counts() -> None:
    bits = np.zeros((1, 5), np.int16)
    salt = salts(NAME, np.arange(5))
    seen = {int(hash_elements(bits, salt)[0])}
    for element in range(5):
        for bit in range(16):
            flipped = bits.copy()
            flipped.view(np.uint16)[0, element] ^= np.uint16(1 << bit)
            seen.add(int(hash_elements(flipped, salt)[0]))
    assert len(seen) == 1 + 5 * 16


def test_swapped_values_change_the_hash() -> None:
    salt = salts(NAME, np.arange(2))
    one, other = (hash_elements(np.array([row]), salt) for row in ([3, 4], [4, 3]))
    assert one != other


def test_parts_of_a_fingerprint_do_not_stand_for_one_another() -> None:
    assert len({combine(1, 2, 3), combine(2, 1, 3), combine(1, 2, None), combine(1, 3, 2)}) == 4


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, math.inf, 5e-324])
def test_bits_of_a_number_are_its_own(value: float) -> None:
    assert np.uint64(float_bits(value)).view(np.float64).tobytes() == np.float64(value).tobytes()


def test_every_nan_is_one_and_nothing_is_another() -> None:
    negative = float(np.uint64(0xFFF8000000000001).view(np.float64))
    assert float_bits(negative) == float_bits(math.nan) != float_bits(None)
