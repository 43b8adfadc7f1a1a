"""Whole runs: an entry for every step, whatever is logged, saved, resumed or skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import CheckpointError
from ascend_run.tools.pages.fingerprint_file import read_fingerprints
from tests.support.probed_runs import Run, probe, train

STEPS = {"train.train_iters": 6, "optimizer.lr_decay_iters": 6}


def entries(folder: Path) -> dict[int, Any]:
    return dict(read_fingerprints(folder / "run").entries)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("straight"), values=STEPS)


@pytest.fixture
def straight(whole: Run) -> dict[int, Any]:
    return entries(whole.folder)


def test_every_step_has_an_entry_of_what_it_came_to(whole: Run, straight: dict[int, Any]) -> None:
    assert [*straight] == [0, 1, 2, 3, 4, 5, 6]
    assert straight[0].loss is straight[0].grad_norm is None
    assert len({entry.parameters for entry in straight.values()}) == 7
    assert len({entry.fingerprint for entry in straight.values()}) == 7
    assert [entry.consumed_samples for entry in straight.values()] == [0, 1, 2, 3, 4, 5, 6]
    for reading in whole.readings():
        entry = straight[reading["step"]]
        assert (entry.loss, entry.grad_norm) == (reading["loss"], reading["grad_norm"])


@pytest.mark.parametrize("most", [64, 2], ids=["at each line of the log", "before there are many"])
def test_steps_between_two_lines_of_the_log_have_theirs(
    tmp_path: Path, straight: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("ascend_run.core.train.fingerprints.MOST_WAITING", most)
    seen: list[int] = []

    def count(self: Any, context: Any) -> None:
        text = (tmp_path / "run/fingerprint.jsonl").read_text()
        seen.append(sum('"fingerprint"' in line for line in text.splitlines()))

    run = train(
        tmp_path,
        probe("ascend_before_step", count),
        values={**STEPS, "train.log_interval": 4},
    )
    assert [reading["step"] for reading in run.readings()] == [4, 6]
    assert entries(tmp_path) == straight
    assert seen == ([1, 1, 1, 1, 5, 5] if most == 64 else [1, 1, 3, 3, 5, 5])


class Died(Exception):
    """Stands for whatever ends a run."""


def test_a_resumed_run_has_the_entries_of_an_uninterrupted_one(
    tmp_path: Path, straight: Any
) -> None:
    def die(self: Any, context: Any) -> None:
        if context.step == 5:
            raise Died

    values = {**STEPS, "checkpoint.save_interval": 2}
    with pytest.raises(Died):
        train(tmp_path, probe("ascend_before_step", die), values=values)
    assert [*entries(tmp_path)] == [0, 1, 2, 3, 4, 5]
    train(tmp_path, values=values)
    assert entries(tmp_path) == straight
    found = read_fingerprints(tmp_path / "run")
    assert (found.superseded, found.problems) == (1, ())


def test_a_checkpoint_carries_the_fingerprint_of_its_step(tmp_path: Path, straight: Any) -> None:
    train(tmp_path, values={**STEPS, "checkpoint.save_interval": 3, "train.log_interval": 6})
    saved = {}
    for path in (tmp_path / "run/checkpoints").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        saved[manifest["step"]] = manifest["values"]["progress"]["fingerprint"]
    assert saved == {3: straight[3].fingerprint, 6: straight[6].fingerprint}


def test_a_skipped_step_has_an_entry_with_the_weights_before_it(tmp_path: Path) -> None:
    values = {
        **STEPS,
        "train.precision": "fp16",
        "optimizer.initial_loss_scale": 2.0**30,
        "train.train_iters": 1,
    }
    train(tmp_path, values=values)
    begun, skipped = entries(tmp_path).values()
    assert skipped.grad_norm is None
    assert skipped.parameters == begun.parameters
    assert skipped.fingerprint != begun.fingerprint


def test_a_model_that_does_not_say_what_it_holds_trains_without_that_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Any
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CheckpointError("this model cannot be checkpointed")

    monkeypatch.setattr("ascend_run.core.fingerprint.sampling.sharded_tensors", refuse)
    train(tmp_path, values=STEPS)
    found = entries(tmp_path)
    assert {entry.parameters for entry in found.values()} == {None}
    assert [entry.loss for entry in found.values()] == [entry.loss for entry in straight.values()]
    log = (tmp_path / "run/log.jsonl").read_text()
    assert "fingerprint.without_parameters" in log
    assert "this model cannot be checkpointed" in log
