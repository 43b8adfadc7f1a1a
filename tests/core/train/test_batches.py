"""What a run reads: datasets that end too early, and plugins that are asked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import DataError
from ascend_run.plugin_api.contracts import Datasets
from ascend_run.testing.models import DENSE, samples
from tests.support.fake_plugins import plugin
from tests.support.probed_runs import prepare, probe, train
from tests.support.tokens import write_tokens


def short_task(folder: Path, train_samples: int, validation_samples: int | None = None) -> Any:
    """A plugin with the run's own task on datasets of so many samples."""
    prepared = prepare(folder)
    task = Hooks(prepared.instances()).require("ascend_task", config=prepared.config)

    class Short:
        roles, metrics, batch_fields = task.roles, (), task.batch_fields
        forward_step = staticmethod(task.forward_step)

        def datasets(self, *asked: Any) -> Datasets:
            validation = validation_samples and samples(DENSE, validation_samples)
            return Datasets(samples(DENSE, train_samples), validation)

    return probe("ascend_task", lambda self: Short(), "short")


def test_a_dataset_that_is_too_short_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the training dataset has 2 samples, expected 3: 3 global"):
        train(tmp_path, short_task(tmp_path, 2), values={"train.train_iters": 3})
    assert not (tmp_path / "run/metrics.jsonl").read_text().count('"loss"')


def test_held_out_data_that_are_too_short_are_refused_too(tmp_path: Path) -> None:
    values = {
        "data.validation": [str(tmp_path / "tokens")],
        "train.eval_interval": 1,
        "train.eval_iters": 5,
    }
    with pytest.raises(DataError, match="the validation dataset has 4 samples, expected 5"):
        train(tmp_path, short_task(tmp_path, 1, 4), values=values)


def test_batches_that_a_plugin_uses_up_end_in_one_message(tmp_path: Path) -> None:
    def every_second(self: Any) -> Any:
        return lambda batches: (batch for i, batch in enumerate(batches) if i % 2)

    problem = "4 samples gave 2 micro-batches to this rank, which is too few"
    with pytest.raises(DataError, match=problem):
        train(
            tmp_path,
            short_task(tmp_path, 4),
            probe("ascend_batch", every_second),
            values={"train.train_iters": 4},
        )


def test_global_batches_of_another_size_go_on_where_the_others_stopped(tmp_path: Path) -> None:
    values = {"checkpoint.save_interval": 1, "optimizer.lr_decay_style": "constant"}
    train(tmp_path, values={**values, "train.train_iters": 2, "train.global_batch_size": 4})
    run = train(tmp_path, values={**values, "train.train_iters": 4, "train.global_batch_size": 1})
    assert [reading["consumed_samples"] for reading in run.readings()] == [4, 8, 9, 10]


def test_plugins_are_asked_for_batches_once_for_all_evaluations(tmp_path: Path) -> None:
    asked: list[str] = []
    wrapped: list[str] = []

    def wrap(self: Any) -> Any:
        asked.append("ascend_batch")
        return lambda batches: (wrapped.append("again"), batches)[1]

    def partition(self: Any) -> None:
        asked.append("ascend_sequence_partition")

    hooks = {"ascend_batch": wrap, "ascend_sequence_partition": partition}
    write_tokens(tmp_path)
    values = {
        "data.validation": [str(tmp_path / "tokens")],
        "train.train_iters": 3,
        "train.eval_interval": 1,
        "train.eval_iters": 1,
    }
    counting = plugin("counting", hooks)()
    train(tmp_path, counting, values={**values, "train.eval_interval": 0})
    without_evaluations = sorted(asked)
    asked.clear()
    train(tmp_path, counting, values={**values, "run.output_dir": str(tmp_path / "again")})
    assert sorted(asked) == without_evaluations
    assert len(wrapped) == 1 + 1 + 4  # the training's twice, and every evaluation's
