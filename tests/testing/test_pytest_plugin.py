"""What every pytest run pays where ascend-run is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ascend_run.testing.conformance import CHECKS


def test_loading_the_pytest_plugin_imports_neither_torch_nor_any_plugin() -> None:
    program = (
        "import sys, ascend_run.testing.pytest_plugin\n"
        "heavy = ('torch', 'megatron', 'numpy', 'ascend_run.plugins', 'ascend_run.registry')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout.strip() == "[]"


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a folder with one test of its own."""
    (folder / "test_own.py").write_text("def test_own(): pass\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
    )


CODES = [check.code for check in CHECKS]


@pytest.mark.parametrize(
    ("path", "own"),
    [((), []), (("test_own.py",), ["test_own.py::test_own"])],
    ids=["alone", "beside tests"],
)
def test_one_command_collects_the_checks_of_the_plugins_it_names(
    tmp_path: Path, path: tuple[str, ...], own: list[str]
) -> None:
    named = ("--ascend-plugin", "gmm", "--ascend-plugin=cpu")

    finished = run_pytest(tmp_path, "--collect-only", *named, *path)

    collected = [line for line in finished.stdout.splitlines() if "::" in line]
    assert collected == [*own, *(f"{name}::{code}" for name in ("gmm", "cpu") for code in CODES)]


def test_deselected_checks_are_counted_among_the_collected(tmp_path: Path) -> None:
    finished = run_pytest(tmp_path, "--collect-only", "--ascend-plugin=cpu", "-k", "KIT-LOAD")

    expected = f"1/{len(CODES)} tests collected ({len(CODES) - 1} deselected)"
    assert expected in finished.stdout


def test_a_limit_that_is_not_above_0_is_refused(tmp_path: Path) -> None:
    finished = run_pytest(tmp_path, "--ascend-plugin=cpu", "--ascend-timeout=0")

    assert finished.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--ascend-timeout 0: expected seconds above 0" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_project_that_names_its_plugin_in_its_settings_keeps_its_tests(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --ascend-plugin=gmm\n")

    finished = run_pytest(tmp_path, "--collect-only")

    collected = [line for line in finished.stdout.splitlines() if "::" in line]
    assert collected == ["test_own.py::test_own", *(f"gmm::{code}" for code in CODES)]


def test_a_failure_is_its_message_and_inapplicable_checks_are_listed(tmp_path: Path) -> None:
    named = ("--ascend-plugin", "nowhere", "--ascend-plugin", "llama")

    finished = run_pytest(tmp_path, *named, "-k", "KIT-LOAD or KIT-BOUNDS")

    assert finished.returncode == 1
    assert "KIT-LOAD: nowhere does not satisfy: it can be imported" in finished.stdout
    assert "unknown plugin 'nowhere'" in finished.stdout
    assert "KIT-BOUNDS llama: it has no options" in finished.stdout
    assert "KIT-BOUNDS nowhere: it cannot be loaded, see KIT-LOAD" in finished.stdout
    assert "Traceback" not in finished.stdout
    assert "1 failed, 3 passed" in finished.stdout
