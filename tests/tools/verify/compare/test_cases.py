"""Which hard cases are found in what ranks have recorded."""

from __future__ import annotations

import attrs
import pytest

from ascend_run.tools.verify.capture.case_record import CaseRecord, MicroBatch, Routing
from ascend_run.tools.verify.capture.record import Record
from ascend_run.tools.verify.compare.cases import Setting, cases
from ascend_run.tools.verify.table import shown_cases

from .made_up import records

PLAIN = Setting(has_dropout=False, ties_weights=False, skipped=None, built_in=True)
EXPERTS = "experts without tokens"
ALL = "experts with all tokens"
BELOW = "experts of a group chosen by a score below 0"
TIES = "equal scores at the last chosen expert"


def row(
    trained: int, last: int, *, step: int = 0, length: int = 8, documents: int = 1
) -> MicroBatch:
    ends = [[last, length - 1]]
    return MicroBatch(step=step, trained=[trained], ends=ends, documents=documents, length=length)


def run(*of_ranks: CaseRecord, axis: str = "dp") -> list[Record]:
    made = records(len(of_ranks), axis)
    return [attrs.evolve(record, cases=seen) for record, seen in zip(made, of_ranks, strict=True)]


def found(made: list[Record], setting: Setting = PLAIN) -> dict[str, bool | None]:
    return {case.name: case.occurred for case in cases(made, setting)}


def test_a_full_batch_of_equal_rows_has_no_hard_case() -> None:
    rows = CaseRecord(micro_batches=[row(8, 7), row(8, 7)])
    assert not any(found(run(rows)).values())
    assert found(run(rows))[EXPERTS] is None


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([row(8, 7), row(0, -1), row(8, 7)], "rows without trained tokens"),
        ([row(8, 7), row(5, 4)], "padding after the last trained token"),
        ([row(8, 7), row(0, -1)], "steps whose last rows train nothing"),
        ([row(8, 7), row(7, 7)], "micro-batches with unequal numbers of trained tokens"),
        ([row(8, 7, documents=2), row(8, 7)], "several documents in a row"),
        ([row(6, 5, length=6)] * 2, "sequence lengths that are no power of two"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_case_of_the_rows_is_found(rows: list[MicroBatch], name: str) -> None:
    occurred = {case for case, known in found(run(CaseRecord(micro_batches=rows))).items() if known}
    assert name in occurred
    assert occurred - {name} <= {
        "rows without trained tokens",
        "micro-batches with unequal numbers of trained tokens",
    }


def test_parts_of_a_row_on_several_ranks_are_one_row() -> None:
    """The first rank of context parallelism has no trained token of a row, the other one has."""
    first = CaseRecord(micro_batches=[row(0, -1), row(4, 3)])
    second = CaseRecord(micro_batches=[row(8, 7), row(4, 7)])
    seen = found(run(first, second, axis="cp"))
    assert not seen["rows without trained tokens"]
    assert not seen["padding after the last trained token"]
    assert not seen["micro-batches with unequal numbers of trained tokens"]


def test_ranks_with_unequal_numbers_of_tokens_are_found() -> None:
    name = "ranks with unequal numbers of trained tokens"
    equal, less = CaseRecord(micro_batches=[row(8, 7)]), CaseRecord(micro_batches=[row(7, 7)])
    assert found(run(equal, less))[name]
    assert not found(run(equal, equal))[name]
    assert found(run(equal))[name] is None


@pytest.mark.parametrize(
    ("tokens", "ties", "expected"),
    [
        ([[4, 2, 2], [4, 2, 2]], 0, set()),
        ([[4, 0, 4], [4, 2, 2]], 0, set()),
        ([[4, 0, 4], [4, 0, 4]], 0, {EXPERTS}),
        ([[8, 4, 4], [8, 4, 4]], 0, {ALL}),
        ([[4, 2, 2], [4, 2, 2]], 1, {TIES}),
    ],
    ids=["none", "on one rank only", "no tokens", "all tokens", "tie"],
)
def test_cases_of_experts_are_found_over_all_ranks(
    tokens: list[list[int]], ties: int, expected: set[str]
) -> None:
    seen = [CaseRecord(routing={"r": Routing(tokens=t, total=8, ties=ties)}) for t in tokens]
    known = found(run(*seen))
    assert {name for name in (EXPERTS, ALL, TIES) if known[name]} == expected


@pytest.mark.parametrize(
    ("below", "occurred"), [((None, None), None), ((0, 0), False), ((0, 3), True)]
)
def test_scores_below_0_are_a_case_of_groups(
    below: tuple[int | None, ...], occurred: bool | None
) -> None:
    seen = [CaseRecord(routing={"r": Routing(tokens=[4, 4], below_zero=n)}) for n in below]
    assert found(run(*seen))[BELOW] is occurred


def test_a_precision_without_skipped_steps_names_the_one_that_has_them() -> None:
    (case,) = [c for c in cases(run(CaseRecord()), PLAIN) if c.name == "skipped steps"]
    assert [*shown_cases([case])] == [
        "not applicable: skipped steps (only fp16 skips any: train.precision=fp16)"
    ]


def test_what_a_run_cannot_have_is_not_applicable() -> None:
    known = found(run(CaseRecord()))
    assert known["tied weights over stages"] is None
    assert known["skipped steps"] is None
    stages = run(CaseRecord(), CaseRecord(), axis="pp")
    tied = attrs.evolve(PLAIN, ties_weights=True, skipped=1)
    assert found(stages)["tied weights over stages"] is False
    assert found(stages, tied)["tied weights over stages"]
    assert found(stages, tied)["skipped steps"]
    assert found(stages, attrs.evolve(tied, skipped=0))["skipped steps"] is False


@pytest.mark.parametrize(
    ("norms", "limit", "expected", "fix"),
    [
        ([1.0, 1.5], 1.2, [True, True], ["", ""]),
        ([1.0, 1.5], 0.4, [False, False], ["optimizer.clip_grad=1.25"] * 2),
        ([1.0, 3.0], 1.2, [False, True], ["optimizer.clip_grad=2", ""]),
        ([1.0, 1.5], 0.0, [False, False], ["optimizer.clip_grad=1.25"] * 2),
        ([], 1.0, [None, None], ["", ""]),
    ],
    ids=["both", "too low", "clipped by more only", "no clipping", "no norms"],
)
def test_steps_on_both_sides_of_the_threshold_are_found(
    norms: list[float], limit: float, expected: list[bool | None], fix: list[str]
) -> None:
    made = [attrs.evolve(record, grad_norms=norms) for record in run(CaseRecord())]
    named = [
        case
        for case in cases(made, attrs.evolve(PLAIN, clip_grad=limit))
        if case.name.startswith("steps whose gradients are")
    ]
    assert [case.occurred for case in named] == expected
    assert [case.detail for case in named] == fix
