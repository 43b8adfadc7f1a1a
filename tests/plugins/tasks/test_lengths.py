"""Rows longer than the model's positions: each document of a row has positions of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError
from tests.support.family_tasks import SAMPLES, TASKS, write_samples
from tests.support.first_steps import assert_same_step, step_values, steps_of
from tests.support.small_runs import prepare, standing_rank

LENGTH = 128
"""Of rows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"))


def values(task: str, folder: Path, *, packing: bool = True, **model: Any) -> dict[str, Any]:
    changes = {f"model.{name}": value for name, value in model.items()}
    return {**step_values(task, folder, packing=packing), "data.seq_length": LENGTH, **changes}


def problems(*given: Any, **changes: Any) -> list[str]:
    try:
        prepare(values(*given, **changes))
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.exhaustive(by=lambda task: {task} & {"dpo"})
@pytest.mark.parametrize("task", TASKS)
def test_a_longer_row_computes_what_a_model_of_more_positions_does(folder: Path, task: str) -> None:
    found = []
    for longest in (LENGTH // 2, LENGTH):
        with steps_of(values(task, folder, max_position_embeddings=longest)) as step:
            found.append(step(None))
    assert_same_step(*found)


def longest_documents(given: dict[str, Any]) -> tuple[int, int]:
    """Return the number of documents that are read, and the most positions of one of them."""
    with standing_rank(given) as (hooks, context):
        task = hooks.require("ascend_task", config=context.config)
        samples = task.datasets(context, 1, 0).train.samples
        numbers = [number for held in samples.packs for number in held]
        rows = [samples.sample_of(pack) for pack in range(len(samples.packs))]
        ends = [row.position_ids[at] for row in rows for at in (row.is_last > 0).nonzero()[0]]
        return len(numbers), int(max(ends)) + 1


@pytest.mark.exhaustive(by=lambda task: {task} & {"prm", "orm"})
@pytest.mark.parametrize("task", TASKS)
def test_only_longer_documents_are_left_out(folder: Path, task: str) -> None:
    group = 1 if task in ("sft", "prm") else 2
    number, most = longest_documents(values(task, folder))
    assert number == SAMPLES * group
    fitting = values(task, folder, max_position_embeddings=most)
    assert longest_documents(fitting) == (number, most)
    shorter = values(task, folder, max_position_embeddings=most - 1)
    left, longest = longest_documents(shorter)
    assert (left, longest < most) == (number - group, True)
    cut = {**shorter, f"plugins.{task}.too_long": "truncate"}
    assert longest_documents(cut)[0] == number


LEARNED = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 64}
DYNAMIC = {"rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0}
LONGROPE = {
    "rope_scaling_type": "longrope",
    "rope_scaling_short_factor": [1.0] * 4,
    "rope_scaling_long_factor": [2.0] * 4,
}
ORIGINAL = "rope_scaling_original_max_position_embeddings"


@pytest.mark.exhaustive(by=lambda task: {task} & {"sft", "simpo"})
@pytest.mark.parametrize("task", TASKS)
def test_learned_positions_are_those_of_a_row(folder: Path, task: str) -> None:
    (problem,) = problems(task, folder, **LEARNED)
    assert problem == (
        f"{task}: data.seq_length=128 is more than model.max_position_embeddings=64, the number of "
        "learned positions, which padding takes too; use at most 64"
    )
    assert problems(task, folder, **{**LEARNED, "max_position_embeddings": 128}) == []


@pytest.mark.parametrize("task", ["sft", "prm"])
def test_a_row_of_one_document_is_limited(folder: Path, task: str) -> None:
    (problem,) = problems(task, folder, packing=False, max_position_embeddings=64)
    assert problem == (
        f"{task}: data.seq_length=128 is more than model.max_position_embeddings=64; use at most "
        f"64, or plugins.{task}.packing=true, since only documents are limited then"
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", ["sft", "prm", "dpo"])
@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (DYNAMIC, "max_position_embeddings"),
        ({**LONGROPE, "max_position_embeddings": 512}, ORIGINAL),
    ],
    ids=["dynamic", "longrope"],
)
def test_scaling_by_the_length_of_a_row_needs_rows_that_are_not_scaled(
    folder: Path, task: str, scaling: dict[str, Any], limit: str
) -> None:
    kind = scaling["rope_scaling_type"]
    (problem,) = problems(task, folder, **scaling, **{limit: 100})
    assert problem == (
        f"{task}: model.rope_scaling_type={kind} turns every token of a row of more than 100 "
        "tokens otherwise, and a row of data.seq_length=128 holds several documents, which may be "
        "shorter; use data.seq_length=100 or less"
        + ("" if task == "dpo" else f", or plugins.{task}.packing=false")
    )
    assert problems(task, folder, **scaling, **{limit: 128}) == []
    if task != "dpo":
        assert problems(task, folder, packing=False, **scaling, **{limit: 100}) == []
