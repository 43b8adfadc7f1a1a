"""A step does not depend on what stands where nothing is trained: labels, padding, and tokens
behind the last trained one of a document. Loss, metrics and gradients are equal in every bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascend_run.testing.pool import GlooPool
from tests.support.chats import write_lines
from tests.support.family_tasks import SOLUTIONS, TASKS, write_samples
from tests.support.first_steps import (
    VOCABULARY,
    Change,
    Sample,
    Step,
    assert_same_step,
    step_values,
    steps_of,
)
from tests.support.needed_plugins import names_of
from tests.support.small_runs import Values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"))


def is_behind(sample: Sample) -> Tensor:
    """Return where neither the position nor a later one of the document is trained; [S] bool."""
    counted = sample.get("is_last", sample["loss_mask"]) > 0
    documents = (sample["position_ids"] == 0).cumsum(0)
    last = {int(documents[at]): at for at in counted.nonzero().flatten().tolist()}
    ends = torch.tensor([last[number] for number in documents.tolist()])
    return torch.arange(len(documents)) > ends


def changed(seed: int) -> Change:
    """Return a change to random tokens and labels where they do not matter."""

    def change(index: int, sample: Sample) -> Sample:
        generator = torch.Generator().manual_seed(seed + index)
        where = {"tokens": is_behind(sample), "labels": sample["loss_mask"] == 0}
        found = dict(sample)
        for name in where.keys() & sample.keys():
            assert where[name].any()
            other = torch.randint(VOCABULARY, sample[name].shape, generator=generator)
            found[name] = torch.where(where[name], other, sample[name])
        return found

    return change


@pytest.mark.exhaustive(by=lambda task, packing: {task} & {"prm"})
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_what_is_not_trained_changes_nothing(folder: Path, task: str, packing: bool) -> None:
    with steps_of(step_values(task, folder, packing=packing)) as step:
        wanted = step(None)
        assert all(gradient.any() for gradient in wanted[1].values())

        @settings(max_examples=4, deadline=None)
        @given(seed=st.integers(0, 2**31))
        def check(seed: int) -> None:
            assert_same_step(step(changed(seed)), wanted)

        check()


LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ulysses": ({"parallel.context_parallel_size": 2}, ("ulysses",)),
    "ring": ({"parallel.context_parallel_size": 2}, ("ring-attention",)),
}


def several_steps(values: Values, enable: Sequence[str], seeds: Sequence[int]) -> list[Step]:
    """Return the step, and that of each change. A job for the pool."""
    with steps_of(values, enable) as step:
        return [step(None), *(step(changed(seed)) for seed in seeds)]


@pytest.mark.exhaustive(by=lambda task, layout: {task} & {"prm"})
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[1]))
@pytest.mark.parametrize("task", TASKS)
def test_nor_where_two_ranks_share_a_sequence(
    gloo_pool: GlooPool, folder: Path, task: str, layout: str
) -> None:
    sizes, plugins = LAYOUTS[layout]
    run = {**step_values(task, folder, packing=True), **sizes}
    for wanted, *found in gloo_pool.run(several_steps, 2, run, plugins, (1, 2), timeout=100):
        for step in found:
            assert_same_step(step, wanted)


@pytest.mark.exhaustive(by=lambda packing: [])
@pytest.mark.parametrize("packing", [False, True])
def test_process_rewards_count_the_rated_placeholders_alone(
    folder: Path, tmp_path: Path, packing: bool
) -> None:
    """Text behind the last placeholder is no part of a solution."""
    run = step_values("prm", folder, packing=packing)
    with steps_of(run) as step:
        wanted = step(None)
    assert wanted[0].count == wanted[0].num_tokens == 4
    lines = (folder / SOLUTIONS).read_text().splitlines()
    longer = [line.replace(" ten.", " ten. six seven") for line in lines]
    assert longer != lines
    with steps_of({**run, "data.train": [write_lines(tmp_path / "longer.jsonl", longer)]}) as step:
        assert_same_step(step(None), wanted)
