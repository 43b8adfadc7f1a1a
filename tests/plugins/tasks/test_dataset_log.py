"""What a task reads stands in the report of its run, whichever task it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ascend_run.tools.pages.run_folder import read_run
from tests.support.chats import CHATML, write_lines, write_tokenizer
from tests.support.preference_files import preferences
from tests.support.rated_solutions import OPTIONS, solutions
from tests.support.small_runs import standing_rank
from tests.tools.report.run_folders import write_run

COUNT = 5


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(name, marks=pytest.mark.needs_plugins(name))
        for name in ("dpo", "simpo", "orm", "prm")
    ],
)
def test_the_data_of_a_task_stand_in_the_report(tmp_path: Path, task: str) -> None:
    write_tokenizer(tmp_path / "tokenizer", CHATML)
    records = solutions(COUNT) if task == "prm" else preferences(COUNT)
    names = [write_lines(tmp_path / f"{name}.jsonl", records) for name in ("one", "two")]
    values = {
        "task": task,
        "run.output_dir": str(tmp_path / "run"),
        "model.num_layers": 1,
        "model.hidden_size": 32,
        "model.num_attention_heads": 4,
        "model.vocab_size": 512,
        "data.train": names,
        "data.train_weights": [3.0, 1.0],
        "data.tokenizer": str(tmp_path / "tokenizer"),
        "data.seq_length": 128,
        "train.eval_interval": 0,
        f"plugins.{task}.packing": False,
        **(OPTIONS if task == "prm" else {}),
    }
    with standing_rank(values) as (hooks, context), capture_logs() as events:
        hooks.require("ascend_task", config=context.config).datasets(context, 8, 0)

    found = read_run(write_run(tmp_path / "done", log=events)).datasets

    assert [each.files for each in found] == [(name,) for name in names]
    assert [each.samples for each in found] == [COUNT, COUNT]
    assert all(each.tokens for each in found)
