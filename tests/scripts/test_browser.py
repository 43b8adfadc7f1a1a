"""Which browser the tests of pages get, how one is set up, and what becomes of them without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import browser

ROOT = Path(__file__).parents[2]
NEEDING = [
    "tests/tools/report/test_plan_page.py::test_names_cannot_become_markup",
    "tests/tools/report/test_in_browser.py::test_an_axis_can_be_logarithmic",
]
Program = Callable[..., Path]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Write a shell script onto a PATH that has nothing else."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(browser.CHOICE, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def write(name: str, *lines: str) -> Path:
        path = tmp_path / name
        path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        path.chmod(0o755)
        return path

    return write


def test_a_browser_that_does_not_start_is_passed_over(program: Program) -> None:
    """As Ubuntu's chromium-browser, which only says what to install."""
    program("chromium-browser", "echo 'requires the chromium snap' >&2", "exit 1")
    edge, _ = program("microsoft-edge"), program("firefox")
    assert browser.find() == ("chromium", str(edge))


def test_firefox_is_taken_where_it_is_chosen_or_alone(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    firefox = program("firefox-esr")
    assert browser.find() == ("firefox", str(firefox))
    chrome = program("google-chrome")
    assert browser.find() == ("chromium", str(chrome))
    monkeypatch.setenv(browser.CHOICE, "firefox")
    assert browser.find() == ("firefox", str(firefox))


def test_an_unknown_choice_is_refused(
    program: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(browser.CHOICE, "lynx")
    with pytest.raises(SystemExit) as refused:
        browser.main()
    assert refused.value.code == 2
    assert "ASCEND_RUN_TEST_BROWSER=lynx: expected one of chromium, firefox" in (
        capsys.readouterr().err
    )


def apt(program: Program, installs: str) -> Path:
    """A package manager that notes what it is asked; the file of its notes."""
    notes = program("unused").with_name("notes")
    case = f'case "$1" in install) {installs} ;; update) exit 100 ;; esac'
    program("apt-get", f'echo "$@" >> {notes}', case)
    return notes


@pytest.mark.parametrize(
    ("choice", "package"), [("", "chromium"), ("chromium", "chromium"), ("firefox", "firefox-esr")]
)
def test_a_missing_browser_is_installed(
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    choice: str,
    package: str,
) -> None:
    """Also where the lists of packages cannot be renewed."""
    monkeypatch.setenv(browser.CHOICE, choice)
    place = program("unused").with_name(package)
    notes = apt(program, f"printf '#!/bin/sh\\n' > {place}; /bin/chmod +x {place}")

    browser.main()

    assert notes.read_text().splitlines() == ["update -qq", f"install -y -qq {package}"]
    assert capsys.readouterr().out == f"browser: {place}\n"


def test_an_installed_browser_is_not_installed_again(program: Program) -> None:
    notes = apt(program, "exit 0")
    program("chromium")
    browser.main()
    assert not notes.exists()


@pytest.mark.parametrize(
    ("installs", "user", "why"),
    [
        (
            "echo 'E: Unable to locate package chromium' >&2; exit 100",
            0,
            "exit code 100: E: Unable",
        ),
        ("exit 0", 0, "what apt-get installed does not start"),
        ("exit 0", 1000, "not root, or no apt-get"),
    ],
)
def test_where_none_can_be_had_one_line_says_what_to_install(
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    installs: str,
    user: int,
    why: str,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    notes = apt(program, installs)

    browser.main()

    (line,) = capsys.readouterr().out.splitlines()
    assert browser.ADVICE in line
    assert why in line
    assert notes.exists() == (user == 0)


@pytest.mark.needs_plugins("gmm", "mixtral", "swap-attention", "ulysses")
@pytest.mark.parametrize("ci", [False, True], ids=["by hand", "CI"])
def test_without_a_browser_pages_are_skipped_and_fail_on_ci(tmp_path: Path, ci: bool) -> None:
    """A session of its own, on a PATH without any program."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PATH": str(tmp_path), **({"CI": "true"} if ci else {})}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *NEEDING],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines = [line for line in done.stdout.splitlines() if browser.ADVICE in line]
    if ci:
        assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
        assert "2 errors" in done.stdout.splitlines()[-1]
        assert lines
    else:
        assert done.returncode == pytest.ExitCode.OK, done.stdout
        (line,) = lines
        assert line.startswith("SKIPPED [2] ")
