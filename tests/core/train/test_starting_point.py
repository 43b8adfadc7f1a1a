"""A run that is restarted with the same command resumes from its own checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import CheckpointError
from tests.support.probed_runs import train

VALUES = {
    "checkpoint.save_interval": 1,
    "checkpoint.keep_last": 0,
    "optimizer.lr_decay_style": "constant",
}


def run(folder: Path, steps: int, **options: Any) -> list[Any]:
    """Train up to a step; the events of this attempt in the log that tell where it began."""
    log = folder / "run/log.jsonl"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    checkpoint = {f"checkpoint.{name}": value for name, value in options.items()}
    train(folder, values={**VALUES, **checkpoint, "train.train_iters": steps})
    return [json.loads(line) for line in log.read_text().splitlines()[before:]]


def began_at(events: list[Any]) -> int | None:
    (first,) = [
        event for event in events if event["event"] in ("checkpoint.resumed", "weights.initialised")
    ]
    return first.get("step")


def warned(events: list[Any], name: str) -> list[Any]:
    return [event for event in events if event["event"] == name]


@pytest.fixture
def base(tmp_path: Path) -> str:
    """The checkpoints of another run: its steps 1 and 2."""
    run(tmp_path / "base", 2)
    return str(tmp_path / "base/run/checkpoints")


@pytest.mark.parametrize("options", [{}, {"step": 1}], ids=["newest", "a step"])
def test_what_the_run_saved_goes_before_what_it_was_loaded_from(
    tmp_path: Path, base: str, options: dict[str, int]
) -> None:
    first = run(tmp_path, 3, load=base, **options)
    assert began_at(first) == options.get("step", 2)
    assert not warned(first, "checkpoint.own_goes_first")
    again = run(tmp_path, 4, load=base, **options)
    assert began_at(again) == 3
    (told,) = warned(again, "checkpoint.own_goes_first")
    assert told["passed_over"] == f"checkpoint.load={base}"
    assert [e["folder"] for e in warned(again, "checkpoint.resumed")] == [
        str(tmp_path / "run/checkpoints")
    ]


def test_a_run_that_went_back_does_so_once(tmp_path: Path) -> None:
    run(tmp_path, 4)
    back = run(tmp_path, 2, step=1)
    assert began_at(back) == 1
    assert warned(back, "checkpoint.older_than_newest")[0]["newer"] == [2, 3, 4]
    # Steps 3 and 4 are still those of before; step 2 is what came of going back.
    again = run(tmp_path, 3, step=1)
    assert began_at(again) == 2
    assert warned(again, "checkpoint.own_goes_first")[0]["passed_over"] == "checkpoint.step=1"
    assert began_at(run(tmp_path, 4, step=1)) == 3


def test_going_back_is_remembered_by_those_that_go_on_from_it(tmp_path: Path) -> None:
    run(tmp_path, 2)
    run(tmp_path, 3, step=1)
    assert began_at(run(tmp_path, 4)) == 3
    assert began_at(run(tmp_path, 5, step=1)) == 4


def test_going_back_to_another_step_is_another_turn(tmp_path: Path) -> None:
    run(tmp_path, 3)
    run(tmp_path, 4, step=2)
    assert began_at(run(tmp_path, 4, step=1)) == 1


def test_without_resuming_a_named_beginning_counts_every_time(tmp_path: Path, base: str) -> None:
    for _ in range(2):
        assert began_at(run(tmp_path, 3, load=base, resume=False)) == 2
        assert began_at(run(tmp_path, 3, step=3, resume=False)) == 3
        assert began_at(run(tmp_path, 3, resume=False)) is None


def test_a_corrupt_one_of_its_own_is_named_and_the_next_is_taken(tmp_path: Path, base: str) -> None:
    run(tmp_path, 4, load=base)
    spoil(tmp_path / "run/checkpoints/step_00000004")
    events = run(tmp_path, 4, load=base)
    assert began_at(events) == 3
    (told,) = warned(events, "checkpoint.corrupt")
    assert told["step"] == 4
    assert "rank_0000.safetensors" in told["reason"]


def test_a_corrupt_newest_checkpoint_is_named_and_the_run_falls_back(tmp_path: Path) -> None:
    run(tmp_path, 3)
    spoil(tmp_path / "run/checkpoints/step_00000003")
    events = run(tmp_path, 3)
    assert began_at(events) == 2
    (told,) = warned(events, "checkpoint.corrupt")
    assert (told["step"], told["level"]) == (3, "error")
    assert "has checksum" in told["reason"]


def test_a_corrupt_step_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    run(tmp_path, 2)
    spoil(tmp_path / "run/checkpoints/step_00000001")
    with pytest.raises(CheckpointError, match=r"step_00000001 is corrupt:\n.*has checksum"):
        run(tmp_path, 3, step=1)


def spoil(checkpoint: Path) -> None:
    """Change one bit of the last tensor."""
    path = checkpoint / "rank_0000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
