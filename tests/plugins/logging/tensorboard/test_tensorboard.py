"""TensorBoard reads back what the run logged."""

from __future__ import annotations

import math
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import Layout, Numerics, RunContext, StorageError
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.logging.tensorboard import TensorBoard, TensorBoardConfig


def context_of(output_dir: Path, rank: int = 0, step: int = 0) -> RunContext:
    return RunContext(
        config=SimpleNamespace(run=SimpleNamespace(output_dir=str(output_dir))),
        layout=Layout(world_size=2, rank=rank),
        device=None,
        groups=None,
        step=step,
    )


def run_of(plugin: TensorBoard, context: RunContext, lines: list[dict[str, Any]]) -> None:
    """Drive the plugin by the kernel's compiled events, as a run does."""
    hooks = Hooks([plugin])
    for line in lines:
        context.step = line["step"]
        if "eval_loss" in line:
            hooks.event("ascend_after_evaluation")(
                context=context, loss=line["eval_loss"], metrics={}
            )
        else:
            hooks.event("ascend_after_log")(context=context, metrics=line)
    hooks.event("ascend_after_run")(context=context)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def single(value: float) -> float:
    return float(np.float32(value))


def test_steps_values_and_tags_are_those_of_the_metrics(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "eval_loss": 8.3177},
        *(
            {"step": step, "loss": 8.0 / step, "lr": 1e-4 * step, "memory_bytes": 2**30 + 64 * step}
            for step in range(1, 40)
        ),
        {"step": 39, "eval_loss": 4.25},
    ]
    run_of(TensorBoard(TensorBoardConfig()), context_of(tmp_path), lines)
    want: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name in line.keys() - {"step"}:
            want.setdefault(name, []).append((line["step"], single(line[name])))
    assert scalars(tmp_path / "tensorboard") == want


def test_lists_flags_and_missing_values(tmp_path: Path) -> None:
    line = {
        "step": 3,
        "expert_load": [0.25, 0.75],
        "expert_load_by_layer": [[], [0.25, 0.75]],
        "skipped": True,
        "loss_scale": None,
        "comment": "text",
        "grad_norm": math.inf,
    }
    run_of(TensorBoard(TensorBoardConfig()), context_of(tmp_path), [line])
    assert scalars(tmp_path / "tensorboard") == {
        "expert_load/0": [(3, 0.25)],
        "expert_load/1": [(3, 0.75)],
        "skipped": [(3, 1.0)],
        "grad_norm": [(3, math.inf)],
    }


def test_a_resumed_run_replaces_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    def attempt(first: int, loss: float) -> None:
        lines = [{"step": step, "loss": loss} for step in range(first, 11)]
        run_of(TensorBoard(TensorBoardConfig()), context_of(tmp_path), lines)

    attempt(first=1, loss=1.0)
    (earlier,) = (tmp_path / "tensorboard").iterdir()
    earlier.rename(earlier.with_name("events.out.tfevents.1000000000"))  # an earlier second
    attempt(first=6, loss=2.0)
    want = [(step, 1.0 if step < 6 else 2.0) for step in range(1, 11)]
    assert scalars(tmp_path / "tensorboard") == {"loss": want}


def test_only_the_writing_rank_makes_a_folder(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval_loss": 8.0}, {"step": 1, "loss": 7.0}]
    run_of(TensorBoard(TensorBoardConfig()), context_of(tmp_path, rank=1), lines)
    assert list(tmp_path.iterdir()) == []
    run_of(TensorBoard(TensorBoardConfig()), context_of(tmp_path, rank=0), lines)
    assert scalars(tmp_path / "tensorboard") == {"eval_loss": [(0, 8.0)], "loss": [(1, 7.0)]}


def test_the_folder_can_be_chosen(tmp_path: Path) -> None:
    plugin = TensorBoard(TensorBoardConfig(folder=str(tmp_path / "elsewhere")))
    run_of(plugin, context_of(tmp_path / "run"), [{"step": 1, "loss": 1.0}])
    assert scalars(tmp_path / "elsewhere") == {"loss": [(1, 1.0)]}
    assert not (tmp_path / "run").exists()


def test_readings_are_on_disk_after_the_flush_time(tmp_path: Path) -> None:
    plugin = TensorBoard(TensorBoardConfig(flush_seconds=1))
    context = context_of(tmp_path, step=1)
    plugin.ascend_after_log(context, {"step": 1, "loss": 1.0})
    deadline = time.monotonic() + 20
    while not scalars(tmp_path / "tensorboard") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert scalars(tmp_path / "tensorboard") == {"loss": [(1, 1.0)]}
    plugin.ascend_after_run()


def test_a_run_that_logged_nothing_ends_quietly(tmp_path: Path) -> None:
    run_of(TensorBoard(TensorBoardConfig()), context_of(tmp_path), [])
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_a_problem_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = TensorBoard(TensorBoardConfig())
    assert list(plugin.ascend_check()) == []
    monkeypatch.setattr("ascend_run.plugins.logging.tensorboard.find_spec", lambda name: None)
    (problem,) = plugin.ascend_check()
    assert "pip install 'ascend-run[tensorboard]'" in problem


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plugin = TensorBoard(TensorBoardConfig(folder=str(tmp_path / "file" / "events")))
    with pytest.raises(StorageError, match=r"plugins\.tensorboard\.folder"):
        plugin.ascend_after_log(context_of(tmp_path), {"step": 1, "loss": 1.0})


@pytest.mark.parametrize("flush_seconds", [1, 1000], ids=["at a flush", "at the end"])
def test_a_full_disk_is_a_storage_error_in_the_thread_of_the_run(
    tmp_path: Path, flush_seconds: int, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = {*threading.enumerate()}
    plugin = TensorBoard(TensorBoardConfig(flush_seconds=flush_seconds))
    context = context_of(tmp_path)
    plugin.ascend_after_log(context, {"step": 1, "loss": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()
    time.sleep(1.1)

    def go_on() -> None:
        try:
            plugin.ascend_after_log(context, {"step": 2, "loss": 1.0})
        finally:
            plugin.ascend_after_run()

    with full_disk(file), pytest.raises(StorageError, match="No space left on device; make room"):
        go_on()
    assert {*threading.enumerate()} <= threads
    assert "Traceback" not in capfd.readouterr().err


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Replace a file that this process has open by /dev/full."""
    (descriptor,) = [
        int(entry.name)
        for entry in Path("/proc/self/fd").iterdir()
        if entry.exists() and entry.samefile(path)
    ]
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    os.close(full)
    yield


def test_files_are_private_to_owner_and_group(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run_of(TensorBoard(TensorBoardConfig()), context_of(tmp_path), [{"step": 1, "loss": 1.0}])
    finally:
        os.umask(before)
    folder = tmp_path / "tensorboard"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_flush_time_that_is_not_positive_is_refused(seconds: int) -> None:
    with pytest.raises(ValueError, match="flush_seconds"):
        TensorBoardConfig(flush_seconds=seconds)


def test_it_declares_that_it_changes_no_number() -> None:
    assert TensorBoard.manifest.numerics is Numerics.BITWISE
    assert claims_of(TensorBoard) == ()


def test_declaring_and_checking_it_imports_neither_torch_nor_tensorboard() -> None:
    code = (
        "import sys\n"
        "from ascend_run.plugins.logging.tensorboard import TensorBoard, TensorBoardConfig\n"
        "TensorBoard(TensorBoardConfig()).ascend_check()\n"
        "assert not {'torch', 'tensorboard'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
