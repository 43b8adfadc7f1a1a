"""List which hard cases the runs exercised: in the others, a fault would not have shown."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from ascend_run.tools.verify.capture.case_record import MicroBatch, Routing
from ascend_run.tools.verify.capture.record import Record

from .verdict import Case

_TIED: Final = "share_embeddings_and_output_weights"


@attrs.frozen(kw_only=True)
class Setting:
    """What is known of a run without its records."""

    has_dropout: bool
    """Whether a run had dropout: its results, masks or resumption were compared."""
    ties_weights: bool
    """Whether embedding and output layer share their weight."""
    skipped: int | None
    """Skipped steps; None if the run does not train in fp16."""
    built_in: bool
    """Whether the model and its batches are built in."""
    clip_grad: float = 0.0
    """Largest norm of the gradients; 0 does not clip."""


def cases(records: Sequence[Record], setting: Setting) -> Iterator[Case]:
    """Yield every case, from the records of the candidate."""
    yield from _of_experts(_routing(records), setting)
    rows = _Rows(records)
    yield from rows.cases()
    yield from _of_clipping(records[0].grad_norms, setting.clip_grad)
    moved = sum(record.cases.offsets for record in records)
    yield Case(
        name="saved tensors at an offset of their storage",
        occurred=moved > 0,
        detail="" if moved else "the built-in model (without --config)",
    )
    stages = records[0].sizes["pp"]
    yield Case(
        name="tied weights over stages",
        occurred=setting.ties_weights if stages > 1 else None,
        detail="" if setting.ties_weights or stages == 1 else f"model.{_TIED}=true",
    )
    yield Case(
        name="dropout",
        occurred=setting.has_dropout,
        detail="" if setting.has_dropout else "model.hidden_dropout=0.1",
    )
    yield Case(
        name="skipped steps",
        occurred=None if setting.skipped is None else setting.skipped > 0,
        detail="only fp16 skips any: train.precision=fp16" if setting.skipped is None else "",
    )


def _routing(records: Sequence[Record]) -> dict[str, list[Routing]]:
    """Router -> its tokens on each rank that has tokens of its own."""
    found = defaultdict(list)
    for record in records:
        for name, seen in record.cases.routing.items():
            found[name].append(seen)
    return dict(found)


def _of_experts(routing: Mapping[str, Sequence[Routing]], setting: Setting) -> Iterator[Case]:
    empty, full, tied = [], [], []
    for name, ranks in routing.items():
        counts = [sum(counts) for counts in zip(*(rank.tokens for rank in ranks), strict=True)]
        total = sum(rank.total for rank in ranks)
        if 0 in counts:
            empty.append(name)
        if total and total in counts:
            full.append(name)
        if any(rank.ties for rank in ranks):
            tied.append(name)
    below = [name for name, ranks in routing.items() if any(rank.below_zero for rank in ranks)]
    has_groups = any(r.below_zero is not None for ranks in routing.values() for r in ranks)
    bias = "model.moe_router_enable_expert_bias=true" if has_groups else ""
    yield Case(
        name="experts of a group chosen by a score below 0",
        occurred=bool(below) if has_groups else None,
        detail=", ".join(below) or bias,
    )
    fix = "" if setting.built_in else "the built-in model (without --config, --model moe)"
    for name, where in (
        ("experts without tokens", empty),
        ("experts with all tokens", full),
        ("equal scores at the last chosen expert", tied),
    ):
        known = bool(where) if routing else None
        detail = ", ".join(where) if where else fix
        yield Case(name=name, occurred=known, detail=detail if routing else "")


def _of_clipping(norms: Sequence[float], limit: float) -> Iterator[Case]:
    """A wrong threshold shows only in a step between it and the right one."""
    known = [norm for norm in norms if math.isfinite(norm)]
    kept = [norm for norm in known if norm < limit]
    little = [norm for norm in known if limit < norm < 2 * limit]
    fix = ""
    if known and not (kept and little):
        fix = f"optimizer.clip_grad={_between(known):.3g}"
    for name, found in (("clipped by less than half", little), ("not clipped", kept)):
        yield Case(
            name=f"steps whose gradients are {name}",
            occurred=bool(found) if known else None,
            detail="" if found else fix,
        )


def _between(norms: Sequence[float]) -> float:
    """Return a threshold between the smallest norm and the next larger one."""
    least, *larger = sorted({*norms})
    return (least + larger[0]) / 2 if larger else least


class _Rows:
    """The rows of all training steps, over the ranks that hold parts of them."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._dp_size = records[0].sizes["dp"]
        self._micro_batches: dict[tuple[int, int], list[MicroBatch]] = defaultdict(list)
        """(data-parallel rank, index) -> parts."""
        for record in records:
            coordinates = record.coordinates
            if coordinates["tp"] == coordinates["pp"] == 0:
                for index, seen in enumerate(record.cases.micro_batches):
                    self._micro_batches[coordinates["dp"], index].append(seen)
        self._steps: dict[int, dict[tuple[int, int], list[int]]] = defaultdict(dict)
        """Step -> (index, data-parallel rank) -> trained tokens of each row."""
        for (dp, index), parts in self._micro_batches.items():
            trained = [sum(row) for row in zip(*(part.trained for part in parts), strict=True)]
            self._steps[parts[0].step][index, dp] = trained

    def cases(self) -> Iterator[Case]:
        parts = [part for found in self._micro_batches.values() for part in found]
        known = bool(parts)
        rows = [row for step in self._steps.values() for rows in step.values() for row in rows]
        yield self._case("rows without trained tokens", known, 0 in rows)
        yield self._case("padding after the last trained token", known, any(self._padded()))
        yield self._case("steps whose last rows train nothing", known, any(self._partial()))
        yield self._case(
            "micro-batches with unequal numbers of trained tokens",
            known and any(len(step) > 1 for step in self._steps.values()),
            any(len({*map(sum, step.values())}) > 1 for step in self._steps.values()),
        )
        yield self._case(
            "ranks with unequal numbers of trained tokens",
            known and self._dp_size > 1,
            any(map(self._ranks_differ, self._steps.values())),
        )
        several = any(part.documents > len(part.trained) for part in parts)
        yield Case(
            name="several documents in a row",
            occurred=several if known else None,
            detail="" if several or not known else "--beside eod-reset",
        )
        yield self._case(
            "sequence lengths that are no power of two",
            known,
            any(part.length & (part.length - 1) for part in parts),
        )

    def _case(self, name: str, known: bool, occurred: bool) -> Case:
        return Case(name=name, occurred=occurred if known else None)

    def _padded(self) -> Iterator[bool]:
        for parts in self._micro_batches.values():
            for row in zip(*(part.ends for part in parts), strict=True):
                trained, length = max(end for end, _ in row), max(end for _, end in row)
                yield -1 < trained < length

    def _partial(self) -> Iterator[bool]:
        for step in self._steps.values():
            *_, last = (rows for _, rows in sorted(step.items()))
            yield last[-1] == 0 and any(map(any, step.values()))

    def _ranks_differ(self, step: Mapping[tuple[int, int], Sequence[int]]) -> bool:
        totals: dict[int, int] = defaultdict(int)
        for (_, dp), rows in step.items():
            totals[dp] += sum(rows)
        return len({*totals.values()}) > 1
