"""A signal in the middle of a conversion."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ascend_run.tools.convert import new_folder as folders
from ascend_run.tools.convert.new_folder import new_folder, partial_folder
from tests.support.family_checks import stored

from .interrupted_driver import POINTS
from .megatron_files import hugging_face
from .test_mp_rank import check_equal, convert


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver has found, with the ``source`` of its conversions and its ``root``."""
    root = tmp_path_factory.mktemp("interrupted")
    hf = hugging_face(root / "source")
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.convert.interrupted_driver", str(root), "5"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "source": hf, "root": root}


@pytest.mark.timeout(200)
def test_a_signal_at_a_random_write_leaves_no_target(interrupted: dict[str, Any]) -> None:
    """SIGKILL leaves a partial folder until the next run; SIGTERM and Ctrl-C leave nothing."""
    results = interrupted["random"]
    assert len(results) == 8
    killed_with_remains = 0
    for result in results:
        assert result["again"] == 0, result
        assert result["at_end"] == ["target"], result
        complete = result["left"] == ["target"]
        if result["signal"] == "SIGKILL":
            assert os.WTERMSIG(result["status"]) == 9
            partial = [name for name in result["left"] if name.endswith(".partial")]
            assert complete or result["left"] == partial, result
            killed_with_remains += len(partial)
        else:
            word, code = {"SIGTERM": ("terminated", 143), "SIGINT": ("interrupted", 130)}[
                result["signal"]
            ]
            assert os.waitstatus_to_exitcode(result["status"]) == code, result
            assert result["messages"].split() == [word], result
            assert complete or not result["left"], result
            assert complete or not result["parent_left"], result
        out = interrupted["root"] / "read" / Path(result["target"]).parents[1].name
        assert convert("--to", "hf", result["target"], out) == 0
        check_equal(stored(out), interrupted["source"])
    assert killed_with_remains > 1


@pytest.mark.timeout(200)
def test_a_kill_at_a_chosen_point_leaves_no_target(interrupted: dict[str, Any]) -> None:
    """In the thread that writes, in half a block, before the flush, and before the rename."""
    results = interrupted["chosen"]
    assert [result["point"] for result in results] == [*POINTS, "half a block"]
    for result in results:
        in_half = result["point"] == "half a block"
        number = signal.SIGXFSZ if in_half else signal.SIGKILL
        assert os.WTERMSIG(result["status"]) == number, result
        folders = {Path(name).parts[0] for name in result["left"]}
        assert all(name.endswith(".partial") for name in folders), result
        assert len(folders) == 1, result
    assert set(results[-1]["left"].values()) == {results[-1]["size"]}, "half of the bytes"


def test_the_folder_of_a_running_conversion_is_not_removed(tmp_path: Path) -> None:
    """Two of the same target at a time: the first to finish has it."""
    target = tmp_path / "out"
    remains = tmp_path / ".out.abcdefgh.partial"
    remains.mkdir()
    other = tmp_path / ".other.abcdefgh.partial"
    other.mkdir()
    with new_folder(target) as first:
        assert not remains.exists()
        (first / "one").write_text("1")
        with pytest.raises(RuntimeError), new_folder(target):
            raise RuntimeError
        assert (first / "one").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "out"]


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process: once before it is opened, once between that and the lock."""
    target, made = tmp_path / "out", []
    create, lock = tempfile.mkdtemp, fcntl.flock

    def created(**names: Any) -> str:
        made.append(create(**names))
        if len(made) == 1:
            folders._remove_remains(target)
        return made[-1]

    def locked(descriptor: int, how: int) -> None:
        if len(made) == 2 and not how & fcntl.LOCK_NB:
            folders._remove_remains(target)
        lock(descriptor, how)

    monkeypatch.setattr(tempfile, "mkdtemp", created)
    monkeypatch.setattr(fcntl, "flock", locked)
    with partial_folder(target) as beside:
        assert len(made) == 3
        assert str(beside) == made[-1]
        folders._remove_remains(target)
        assert [path.name for path in tmp_path.iterdir()] == [beside.name]
    assert not [*tmp_path.iterdir()]


def test_an_os_error_of_the_comparison_is_not_the_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object) -> None:
        raise OSError(24, os.strerror(24))

    from ascend_run.tools.convert import conversion

    hugging_face(tmp_path / "hf")
    monkeypatch.setattr(conversion, "compare_tensors", failing)
    words = ("--to", "mp-rank", "--verify", "tensors", tmp_path / "hf", tmp_path / "out")
    assert convert(*words) == 2
    message = capsys.readouterr().err
    assert f"the comparison of {tmp_path}/out with {tmp_path}/hf failed" in message
    assert "Too many open files" in message
    assert "cannot be written" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
