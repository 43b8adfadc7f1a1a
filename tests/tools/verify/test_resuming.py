"""A run that is stopped and resumed on ranks: exact, or said to be not, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from ascend_run.testing.offering import offered
from ascend_run.testing.pool import GlooPool
from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.text.indexed import IndexedWriter, dtype_for
from ascend_run.tools.verify.capture.training_record import RunState, TrainedStep, TrainingRecord
from ascend_run.tools.verify.compare.resuming import ResumedRun, compare_resumed
from ascend_run.tools.verify.compare.verdict import Check, Fault, Phase
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.ranks import PoolRanks
from ascend_run.tools.verify.resuming import stop_and_resume
from ascend_run.tools.verify.sides import sides_of
from tests.testing import planted
from tests.tools.verify import faults


def resumed(pool: GlooPool, question: Question, fault: Callable[[], Any] | None) -> ResumedRun:
    side = sides_of(attrs.evolve(question, resume=True)).resumable
    assert side is not None
    return stop_and_resume(PoolRanks(pool), side, fault)


def test_a_resumed_run_is_exact(gloo_pool: GlooPool) -> None:
    run = resumed(gloo_pool, Question(layout={"tp": 2}), None)
    checks, fault = compare_resumed(run)
    assert fault is None
    assert {check.name.removesuffix(", resumed") for check in checks} == {
        "rows",
        "losses",
        "gradient norms",
        "weights",
        "optimizer state",
        "random streams",
        "progress",
    }
    assert all(check.applies for check in checks)
    assert all(check.passed for check in checks)
    rows = [tuple(step.rows) for record in run.whole for step in record.steps.values()]
    assert len(set(rows)) == 4, "each step reads other rows, the same on both ranks"
    assert len({step.loss for step in run.whole[0].steps.values()}) == 4


@pytest.mark.exhaustive(by=lambda question: ["of a plugin" if question.enable else "of the run"])
@pytest.mark.parametrize(
    ("question", "fault", "module", "why"),
    [
        (Question(layout={}), faults.skip_a_batch, "data order", "step 3 reads the rows of step 4"),
        (
            Question(layout={"tp": 2}),
            faults.restore_what_rank_0_saved,
            "random streams",
            "is rank 0's when restored",
        ),
        (
            Question(layout={}),
            faults.forget_the_streams_of_parallel_ranks,
            "random streams",
            "tracker.data-parallel-rng (0,) differs when restored",
        ),
        (
            Question(layout={}),
            faults.forget_the_second_moments,
            "optimizer state",
            "optimizer/exp_avg_sq/",
        ),
        (
            Question(enable=("forgets-its-count",), layout={}),
            None,
            "state in no checkpoint",
            "forgets-its-count.count is 2, not 4",
        ),
        (
            Question(enable=("restores-rank-0",), layout={"dp": 2}),
            None,
            "checkpoint entry counts",
            "rank 1: counts/rank_00001/count (0,) is rank 0's when restored",
        ),
    ],
    ids=["skipped", "of rank 0", "streams", "moments", "listener", "entry of rank 0"],
)
def test_what_is_not_resumed_is_named(
    gloo_pool: GlooPool,
    question: Question,
    fault: Callable[[], Any] | None,
    module: str,
    why: str,
) -> None:
    with offered(planted.ForgetsItsCount, planted.RestoresRank0):
        _, found = compare_resumed(resumed(gloo_pool, question, fault))
    assert found is not None
    assert (found.phase, found.module) == (Phase.RESUME, module)
    assert why in found.why


def test_the_data_of_a_file_is_resumed(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Dropout, precision and data are the file's."""
    with bin_path(str(tmp_path / "tokens")).open("wb") as stream:
        writer = IndexedWriter(stream, dtype_for(64))
        for document in range(12):
            writer.add([(7 * document + position) % 64 for position in range(20)])
    idx_path(str(tmp_path / "tokens")).write_bytes(writer.index())
    model = ["num_layers = 1", "hidden_size = 16", "num_attention_heads = 2", "vocab_size = 64"]
    data = [f'train = ["{tmp_path / "tokens"}"]', "seq_length = 16"]
    train = ["global_batch_size = 4", 'precision = "bf16"']
    sections = {"model": [*model, "hidden_dropout = 0.1"], "data": data, "train": train}
    file = tmp_path / "run.toml"
    file.write_text("\n".join("\n".join([f"[{name}]", *s]) for name, s in sections.items()))
    question = Question(file=str(file), layout={})

    assert compare_resumed(resumed(gloo_pool, question, None))[1] is None
    _, fault = compare_resumed(resumed(gloo_pool, question, faults.start_the_data_over))
    assert fault is not None
    assert fault.module == "data order"


def made_up(first: int, steps: range) -> TrainingRecord:
    state = RunState(tensors={}, values={"progress": {"step": steps[-1]}}, attributes={})
    return TrainingRecord(
        rank=0,
        first_step=first,
        start=attrs.evolve(state, values={"progress": {"step": first}}),
        steps={n: TrainedStep(rows=[f"{n}"], loss=1.0 / n, grad_norm=None) for n in steps},
        end=state,
    )


def checked(**changed: TrainedStep) -> tuple[list[Check], Fault | None]:
    """Compare runs of which one step is changed."""
    records = {
        "whole": made_up(0, range(1, 5)),
        "stopped": made_up(0, range(1, 3)),
        "resumed": made_up(2, range(3, 5)),
    }
    for name, step in changed.items():
        record = records[name]
        first = next(iter(record.steps))
        records[name] = attrs.evolve(record, steps={**record.steps, first: step})
    return compare_resumed(ResumedRun(**{n: [r] for n, r in records.items()}))


def compared(**changed: TrainedStep) -> tuple[str | None, set[str]]:
    """The module of the fault and the failed checks."""
    checks, fault = checked(**changed)
    failed = {check.name for check in checks if not check.passed}
    return None if fault is None else fault.module, failed


def test_steps_before_the_stop_must_be_the_same_too() -> None:
    assert compared() == (None, set())
    other = TrainedStep(rows=["1"], loss=0.5, grad_norm=None)
    assert compared(stopped=other) == ("reproducibility", {"losses, resumed"})
    later = TrainedStep(rows=["3"], loss=0.5, grad_norm=None)
    assert compared(resumed=later) == ("state in no checkpoint", {"losses, resumed"})
    nan = TrainedStep(rows=["1"], loss=float("nan"), grad_norm=None)
    assert compared(whole=nan, stopped=nan) == (None, set())


def test_a_different_loss_has_a_relative_error_and_a_step() -> None:
    checks, _ = checked(resumed=TrainedStep(rows=["3"], loss=1.01 / 3, grad_norm=None))
    (losses,) = [check for check in checks if not check.passed]
    assert losses.worst == pytest.approx(0.01)
    assert losses.where == "step 3 on rank 0"


def test_other_rows_have_a_step_and_no_error() -> None:
    checks, _ = checked(resumed=TrainedStep(rows=["4"], loss=1 / 3, grad_norm=None))
    (rows,) = [check for check in checks if not check.passed]
    assert (rows.worst, rows.where) == (0.0, "step 3 on rank 0")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("torch", "torch"),
        ("tracker.model-parallel-rng", "tracker.model-parallel-rng (tp=2,sp does)"),
    ],
)
def test_a_stream_that_nothing_drew_from_is_not_ok(name: str, shown: str) -> None:
    whole, stopped, resumed = (made_up(n, range(n + 1, n + 3)) for n in (0, 0, 2))
    stream = {f"rng/rank_00000/{name} (0,)": torch.zeros(2, dtype=torch.uint8)}
    for record in (whole, stopped, resumed):
        record.start = attrs.evolve(record.start, tensors=stream)
        record.end = attrs.evolve(record.end, tensors=stream)
    checks, _ = compare_resumed(ResumedRun(whole=[whole], stopped=[stopped], resumed=[resumed]))
    states = {check.name: check.state for check in checks}
    assert states["random streams, resumed"] == "-"
    (unused,) = [check for check in checks if check.name.startswith("unused")]
    assert (unused.state, unused.where) == ("-", f"nothing drew from {shown}")


def test_a_step_without_rows_shows_nothing() -> None:
    empty = TrainedStep(rows=[], loss=1.0, grad_norm=None)
    assert compared(whole=empty, stopped=empty) == ("data order", {"rows, resumed"})
