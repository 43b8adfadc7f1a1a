"""Check the dropout masks of one run, over ranks, layers and micro-batches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from ascend_run.tools.verify.capture.mask_record import ATTENTION, DropoutMask
from ascend_run.tools.verify.capture.record import Record

from .readings import shortened
from .thresholds import FALSE_ALARM, REPLICATED
from .verdict import ITSELF, Check, Fault, Phase

_NAME: Final = "dropout masks"
_MAX_BITS: Final = -math.log2(FALSE_ALARM)


@attrs.frozen
class _Drawn:
    """A mask and the rank that drew it."""

    record: Record
    mask: DropoutMask

    @property
    def place(self) -> str:
        mask = self.mask
        return f"{mask.module} (mask {mask.call}, micro-batch {mask.micro_batch})"

    def __str__(self) -> str:
        return f"rank {self.record.rank}, {self.place}"


def compare_masks(
    records: Sequence[Record], probabilities: Mapping[str, float]
) -> tuple[Check, Fault | None]:
    """Check the masks of all ranks.

    - Masks of attention weights differ between any two ranks, layers and micro-batches.
    - Other masks differ between layers and micro-batches of a rank. Between tensor-parallel ranks
      they are equal exactly if the activations that they are applied to are replicas.
    - The kept share agrees with the probability.
    - A mask that is drawn again for the backward is one of the forward.

    Masks of so few elements that chance may make them equal are left out.

    Args:
        probabilities: Kind of mask -> the model's probability, of those that must be drawn.
    """
    found = [*_problems(records, probabilities)]
    check = Check(
        name=_NAME,
        against=ITSELF,
        passed=not found,
        applies=any(not mask.is_redrawn for record in records for mask in record.masks),
        details=shortened([text for _, text in found]),
    )
    if not found:
        return check, None
    modules = [*dict.fromkeys(module or "random streams" for module, _ in found)]
    return check, Fault(
        phase=Phase.FORWARD, module=modules[0], suspects=tuple(modules[1:6]), why=found[0][1]
    )


def _problems(
    records: Sequence[Record], probabilities: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    """Yield (module, message)."""
    drawn = [_Drawn(r, mask) for r in records for mask in r.masks if not mask.is_redrawn]
    yield from _missing(drawn, probabilities)
    yield from _repeated([d for d in drawn if d.mask.kind == ATTENTION])
    for record in records:
        others = [d for d in drawn if d.mask.kind != ATTENTION and d.record is record]
        yield from _repeated(others)
    yield from _over_tensor_parallel_ranks([d for d in drawn if d.mask.kind != ATTENTION])
    yield from _shares(drawn, probabilities)
    for record in records:
        yield from _redrawn(record)


def _missing(
    drawn: Sequence[_Drawn], probabilities: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    for kind, probability in probabilities.items():
        if probability and not any(one.mask.kind == kind for one in drawn):
            yield "", f"no rank draws a mask of {kind} dropout, which is {probability}"


def _repeated(drawn: Sequence[_Drawn]) -> Iterator[tuple[str, str]]:
    """Yield a problem for each mask that is equal to an earlier one."""
    first: dict[str, _Drawn] = {}
    for one in drawn:
        other = first.setdefault(one.mask.digest, one)
        if other is not one and _is_long(one.mask):
            text = f"{one} has the mask of {other}; they must be independent"
            yield one.mask.module, text


def _over_tensor_parallel_ranks(drawn: Sequence[_Drawn]) -> Iterator[tuple[str, str]]:
    groups: dict[tuple[object, ...], list[_Drawn]] = defaultdict(list)
    for one in drawn:
        where = one.record.coordinates
        groups[one.place, where["pp"], where["cp"], where["dp"]].append(one)
    for first, *others in groups.values():
        for other in others:
            replicated = _are_replicas(first.mask, other.mask)
            same = first.mask.digest == other.mask.digest
            if replicated is None or same == replicated or not _is_long(first.mask):
                continue
            ranks = f"tensor-parallel ranks {first.record.rank} and {other.record.rank}"
            what = "replicas and must be the same" if replicated else "shards and must differ"
            yield first.mask.module, f"{first.place}: masks of {ranks} drop {what}"


def _are_replicas(one: DropoutMask, other: DropoutMask) -> bool | None:
    """Return whether two masks are applied to replicas of one tensor; None if it is not known."""
    if not one.dropped or not other.dropped or _is_constant(one.dropped):
        return None
    return one.size == other.size and all(
        math.isclose(a, b, rel_tol=REPLICATED)
        for a, b in zip(one.dropped[1:], other.dropped[1:], strict=True)
    )


def _is_constant(moments: Sequence[float]) -> bool:
    count, total, squares = moments[:3]
    return math.isclose(count * squares, total * total, rel_tol=REPLICATED)


def _is_long(mask: DropoutMask) -> bool:
    """Return whether two independent masks are equal with less than the allowed probability."""
    same = mask.keep**2 + (1.0 - mask.keep) ** 2
    return same < 1.0 and -mask.size * math.log2(same) > _MAX_BITS


def _shares(
    drawn: Sequence[_Drawn], probabilities: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    """Yield a problem for each module whose masks keep an improbable share."""
    totals: dict[tuple[int, str, str, float], list[int]] = defaultdict(lambda: [0, 0])
    for one in drawn:
        kind = one.mask.kind
        keep = 1.0 - probabilities[kind] if probabilities.get(kind) else one.mask.keep
        total = totals[one.record.rank, kind or one.mask.module, one.mask.module, keep]
        total[0] += one.mask.kept
        total[1] += one.mask.size
    for (rank, kind, module, keep), (kept, size) in totals.items():
        if _chance(kept / size, keep, size) < FALSE_ALARM:
            yield (
                module,
                (
                    f"rank {rank}, {module}: {kind} masks keep {kept} of {size} elements, "
                    f"{kept / size:.4f}; expected {keep:.4f}"
                ),
            )


def _chance(share: float, keep: float, size: int) -> float:
    """Return the Chernoff bound of the probability that the share is as far from ``keep``."""
    if keep in (0.0, 1.0):
        return 1.0 if share == keep else 0.0
    divergence = sum(
        a * math.log(a / b) for a, b in ((share, keep), (1.0 - share, 1.0 - keep)) if a > 0.0
    )
    return min(1.0, 2.0 * math.exp(-size * divergence))


def _redrawn(record: Record) -> Iterator[tuple[str, str]]:
    known = {mask.digest for mask in record.masks if not mask.is_redrawn}
    shapes = {(mask.size, mask.keep) for mask in record.masks if not mask.is_redrawn}
    for mask in record.masks:
        is_known = mask.is_redrawn and (mask.size, mask.keep) in shapes
        if is_known and mask.digest not in known and _is_long(mask):
            where = mask.module or "the backward"
            yield mask.module, f"rank {record.rank}: {where} recomputes with another dropout mask"
            return
