"""Compare what the ranks of two runs hold: bitwise, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_run.testing import tensors
from ascend_run.tools.verify.capture.training_record import RunState, TrainingRecord

WEIGHTS: Final = "weights"
OPTIMIZER: Final = "optimizer state"
STREAMS: Final = "random streams"
PROGRESS: Final = "progress"
ENTRIES: Final = "plugin entries"
_KINDS: Final = {"model": WEIGHTS, "optimizer": OPTIMIZER, "rng": STREAMS, "progress": PROGRESS}
"""Entry of a checkpoint, without the role -> what it is; other entries are plugins'."""


@attrs.frozen
class Difference:
    """A value that differs on one rank."""

    key: str
    text: str
    where: str
    error: float | None = None
    """Relative error; None for values without a size, such as the state of a generator."""


def differences(
    expected: Sequence[RunState], found: Sequence[RunState], when: str
) -> list[Difference]:
    """Return what differs between two runs, given by rank.

    Args:
        when: For the text.
    """
    return [*_differences(expected, found, when)]


def keys_of(state: RunState) -> list[str]:
    """Return the keys of all tensors and values."""
    values = [f"{entry}/{key}" for entry, held in state.values.items() for key in held]
    return [*state.tensors, *values]


def kind_of(key: str) -> str:
    """Return what a key belongs to, such as the weights."""
    return _KINDS.get(_entry(key).partition(".")[0], ENTRIES)


def owner_of(key: str) -> str:
    """Return how a fault names what a key belongs to."""
    kind = kind_of(key)
    return f"checkpoint entry {_entry(key)}" if kind == ENTRIES else kind


def other_attributes(expected: Sequence[RunState], found: Sequence[RunState]) -> Iterator[str]:
    """Yield a message for each attribute of a plugin instance that differs on rank 0."""
    one, two = expected[0].attributes, found[0].attributes
    for name in dict.fromkeys((*one, *two)):
        if one.get(name) != two.get(name):
            yield f"{name} is {two.get(name)}, not {one.get(name)}"


def unused_streams(records: Sequence[TrainingRecord]) -> dict[str, str]:
    """Return key -> name of each random stream that a run ends with the state it started with.

    Such a stream is equal in the resumed run whether it was restored or not.

    Args:
        records: Those of the run that was stopped.
    """
    unused: dict[str, str] = {}
    for record in records:
        for key, end in record.end.tensors.items():
            start = record.start.tensors.get(key)
            if kind_of(key) == STREAMS and start is not None and _are_equal(start, end):
                unused[key] = _stream(key)
    return unused


def relative_error(expected: object, found: object) -> float | None:
    """Return the relative error of a floating-point tensor or number; None for other values."""
    if isinstance(expected, float) and isinstance(found, float):
        expected, found = (torch.tensor(x, dtype=torch.float64) for x in (expected, found))
    if not (isinstance(expected, Tensor) and isinstance(found, Tensor)):
        return None
    return tensors.relative_error(found, expected) if expected.is_floating_point() else None


def _stream(key: str) -> str:
    """``rng/rank_00000/torch (0,)`` -> ``torch``."""
    return key.rpartition("/")[2].partition(" ")[0]


def _differences(
    expected: Sequence[RunState], found: Sequence[RunState], when: str
) -> Iterator[Difference]:
    for rank, (state, other) in enumerate(zip(expected, found, strict=True)):
        for key in dict.fromkeys((*keys_of(state), *keys_of(other))):
            one, two = _value(state, key), _value(other, key)
            if _are_equal(one, two):
                continue
            how = _how(one, two)
            if (owner := _other_rank(expected, rank, key, two)) is not None:
                how = f"is rank {owner}'s"
            text, where = f"rank {rank}: {key} {how} {when}", f"{key} on rank {rank}"
            yield Difference(key, text, where, relative_error(one, two))


def _entry(key: str) -> str:
    return key.partition("/")[0]


def _value(state: RunState, key: str) -> object:
    if key in state.tensors:
        return state.tensors[key]
    entry, _, name = key.partition("/")
    held: Mapping[str, object] = state.values.get(entry, {})
    return held.get(name)


def _are_equal(one: object, two: object) -> bool:
    if not (isinstance(one, Tensor) and isinstance(two, Tensor)):
        return repr(one) == repr(two)
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(_bits(one), _bits(two))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _how(one: object, two: object) -> str:
    if one is None or two is None:
        return "is missing" if two is None else "is new"
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        error = relative_error(one, two)
        return "differs" if error is None else f"differs by {error:.2g}"
    return f"is {two!r}, not {one!r},"


def _other_rank(states: Sequence[RunState], rank: int, key: str, value: object) -> int | None:
    """Return the rank whose tensor this rank holds; None if it is no other rank's."""
    mine = f"/rank_{rank:05d}/"
    if mine not in key or not isinstance(value, Tensor):
        return None
    for other, state in enumerate(states):
        theirs = state.tensors.get(key.replace(mine, f"/rank_{other:05d}/"))
        if other != rank and theirs is not None and _are_equal(theirs, value):
            return other
    return None
