"""A signal in the middle of a conversion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_run.tools.convert.new_folder import new_folder
from tests.support.family_checks import stored

from .megatron_files import hugging_face
from .test_mp_rank import check_equal, convert


@pytest.mark.timeout(200)
def test_a_signal_at_a_random_write_leaves_no_target(tmp_path: Path) -> None:
    """SIGKILL leaves a partial folder until the next run; SIGTERM and Ctrl-C leave nothing."""
    hf = hugging_face(tmp_path / "source")
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.convert.interrupted_driver", str(tmp_path), "5"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
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
        out = tmp_path / "read" / Path(result["target"]).parents[1].name
        assert convert("--to", "hf", result["target"], out) == 0
        check_equal(stored(out), hf)
    assert killed_with_remains > 1


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
