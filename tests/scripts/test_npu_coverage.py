"""The measured coverage includes ranks, each of which runs a branch of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.npu_coverage import report_of, run_test

SOURCE = """
def work():
    from torch import distributed

    if distributed.get_rank() == 0:
        return "zero"
    elif distributed.get_rank() == 1:
        return "one"
    elif distributed.get_rank() == 2:
        return "two"
    return "more"
"""
TEST = """
from measured.source import work

def test_three_ranks(gloo_pool):
    assert gloo_pool.run(work, 3) == ["zero", "one", "two"]
"""


def test_ranks_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no rank runs is missing, and nothing else."""
    source = tmp_path / "measured"
    source.mkdir()
    (source / "__init__.py").touch()
    (source / "source.py").write_text(SOURCE)
    (tmp_path / "test_three.py").write_text(TEST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_test(str(tmp_path / "test_three.py"), tmp_path / "stored", source)
    found = report_of([tmp_path / "stored"], tmp_path, source)["files"]
    (measured,) = (found[name] for name in found if name.endswith("source.py"))
    number = SOURCE.splitlines().index('    return "more"') + 1
    assert measured["missing_lines"] == [number]
    assert measured["missing_branches"] == [[number - 2, number]]


def test_a_test_that_fails_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert 1 == 2\n")
    with pytest.raises(SystemExit, match=r"test_one\.py or the end of its ranks failed"):
        run_test(str(tmp_path / "test_one.py"), tmp_path / "stored", tmp_path)
