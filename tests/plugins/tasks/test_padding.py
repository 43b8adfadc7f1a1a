"""A step does not depend on how much padding its rows have, or on packing. In float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.family_tasks import TASKS, write_samples
from tests.support.first_steps import assert_near_step, step_values, steps_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"))


@pytest.mark.exhaustive(by=lambda task: {task} & {"simpo"})
@pytest.mark.parametrize("task", TASKS)
def test_padding_changes_nothing(folder: Path, task: str) -> None:
    found = []
    for length, packing in ((64, False), (72, False), (128, False), (128, True), (256, True)):
        run = {**step_values(task, folder, packing=packing), "data.seq_length": length}
        if task == "sft":
            run["plugins.sft.padding"] = "seq_length"
        with steps_of(run) as step:
            found.append(step(None))
    for one in found[1:]:
        assert_near_step(one, found[0])
