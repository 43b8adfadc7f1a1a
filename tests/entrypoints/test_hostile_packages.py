"""Installed packages that no one named run no code and stop nothing; named ones are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.plugin_api import AscendRunError
from ascend_run.prepare.prepare import prepare
from ascend_run.tools.plugins import showing
from tests.support.hostile_packages import EVERY, Hostile, install_cycle

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/dense.toml"
UNNAMED = [
    ["--help"],
    ["plugins"],
    ["plugins", "--json"],
    ["plan", "--config", str(CONFIG), "data.train=nowhere"],
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for package in EVERY:
        package.install(folder)
    install_cycle(folder)
    return folder


@pytest.fixture(autouse=True)
def _installed(site: Path) -> Iterator[None]:
    """On ``sys.path`` for one test, after which the process is what it was."""
    environment, path = dict(os.environ), [*sys.path]
    sys.path.insert(0, str(site))
    with warnings.catch_warnings():
        yield
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    for name in [name for name in sys.modules if name.startswith("hostile_")]:
        del sys.modules[name]
    for canary in canaries(site):
        (site / f"{canary}.ran").unlink()


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``plugins show`` starts no further process for each package."""
    monkeypatch.setattr(showing, "import_time", lambda module: None)


def canaries(site: Path) -> list[str]:
    return sorted(path.stem for path in site.glob("*.ran"))


def test_there_are_fifty_of_them() -> None:
    assert len(EVERY) >= 50
    assert len({package.what for package in EVERY}) == len(EVERY)


@pytest.mark.parametrize("arguments", UNNAMED, ids=lambda arguments: " ".join(arguments[:2]))
def test_a_command_that_names_none_works_and_runs_none(
    site: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code = run(arguments)

    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert canaries(site) == []


def test_so_it_is_in_a_process_of_its_own(site: Path) -> None:
    program = "import sys; from ascend_run.entrypoints.cli import run; sys.exit(run(sys.argv[1:]))"
    process = subprocess.run(
        [sys.executable, "-c", program, "plugins", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(site)},
    )

    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert {row["name"] for row in json.loads(process.stdout)} >= {"cpu", "sys-exit-at-import"}
    assert canaries(site) == []


def test_a_run_can_be_prepared_and_has_our_plugins(site: Path, tmp_path: Path) -> None:
    overrides = ["data.train=nowhere", f"run.output_dir={tmp_path}"]

    prepared = prepare(CONFIG, overrides)

    assert prepared.config.platform == "cpu"
    assert {entry["distribution"] for entry in prepared.lock.values()} == {"ascend-run"}
    assert canaries(site) == []


def test_each_is_listed_as_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins"]) == 0

    page = capsys.readouterr().out
    assert [p.what for p in EVERY if (p.listed or p.name) not in page] == []
    assert "\x1b" not in page


@pytest.mark.parametrize("package", EVERY, ids=lambda package: package.what)
def test_naming_one_is_a_clear_refusal_or_its_own_page(
    site: Path, capsys: pytest.CaptureFixture[str], package: Hostile
) -> None:
    code = run(["plugins", "show", package.name, "--json"])

    printed = capsys.readouterr()
    if not package.named:
        assert code == 0, printed.err
        assert json.loads(printed.out)["name"] == package.name
        return
    assert code == 2
    assert printed.out == ""
    assert "Traceback" not in printed.err
    errors = printed.err.splitlines()
    assert errors[0].startswith("error: ")
    assert package.named in printed.err
    assert len(printed.err) < 8000
    assert set(canaries(site)) <= {package.module}


def test_a_slow_import_is_reported(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "show", "sleeps-at-import"]) == 0

    assert canaries(site) == ["hostile_sleeps_at_import"]  # so one that ran would be seen
    assert "loading 'sleeps-at-import' of hostile-sleeps-at-import 1.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("enable", "problem"),
    [
        ("sys-exit-at-import,manifest-raises", "it called sys.exit(0)"),
        ("first-of-a-cycle,second-of-a-cycle", "the declared order has a cycle"),
        ("second-of-a-cycle", "'second-of-a-cycle' requires 'first-of-a-cycle'; add it"),
        ("twice", "'twice' is provided more than once"),
    ],
)
def test_a_run_that_names_them_is_refused_before_it_starts(enable: str, problem: str) -> None:
    with pytest.raises(AscendRunError) as refusal:
        prepare(CONFIG, ["data.train=nowhere"], enable=enable.split(","))

    assert problem in str(refusal.value)
