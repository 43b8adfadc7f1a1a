"""The command: what it prints, what it refuses, and that it leaves nothing half-written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from ascend_run.entrypoints.cli import program, run
from ascend_run.tools.new_plugin.seams import KINDS, SEAMS
from tests.support.command_line import imported_by, top
from tests.support.installed import Install, offer


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def refusal_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """The problems that a refused command names."""

    def refused(*words: str) -> list[str]:
        assert run(["new-plugin", *words]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        headline, *problems = told.err.splitlines()
        assert headline.startswith("error: cannot write ")
        return [problem.strip() for problem in problems]

    return refused


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_it_writes_a_feature_here_and_says_how_to_try_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new-plugin", "my-own"]) == 0
    headline, *lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert headline == "ascend-run-my-own: feature 'my-own', 9 files. Try it:"
    assert [line.strip() for line in lines] == [
        "pip install --editable './ascend-run-my-own[test]'",
        "ascend-run plugins show my-own",
        "pytest ascend-run-my-own",
    ]
    assert [path.name for path in here.iterdir()] == ["ascend-run-my-own"]
    files = [path for path in (here / "ascend-run-my-own").rglob("*") if path.is_file()]
    assert len(files) == 9
    assert not [path for path in files if path.suffix == ".jinja"]


@pytest.mark.parametrize(
    ("folder", "place", "tested"),
    [
        pytest.param("new/deep", "'./new/deep[test]'", "new/deep", id="missing"),
        pytest.param("empty", "'./empty[test]'", "empty", id="empty"),
        pytest.param(".", "'.[test]'", ".", id="here"),
        pytest.param("with space", "'./with space[test]'", "'with space'", id="with a space"),
    ],
)
def test_a_folder_may_be_named(
    here: Path, capsys: pytest.CaptureFixture[str], folder: str, place: str, tested: str
) -> None:
    (here / "empty").mkdir()
    if folder == ".":
        (here / "empty").rmdir()
    assert run(["new-plugin", "my-own", "--kind", "task", "--folder", folder]) == 0
    output = capsys.readouterr().out
    assert f"pip install --editable {place}\n" in output
    assert output.endswith(f"pytest {tested}\n")
    assert (here / folder / "pyproject.toml").is_file()
    assert not [name for name in os.listdir(here / folder) if name.startswith(".new-plugin")]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("My_Feature", "my-feature"),
        ("two words", "two-words"),
        ("-x", "x"),
        ("3d", "my-feature"),
        ("", "my-feature"),
        ("a--b", "a-b"),
        ("../up", "up"),
    ],
)
def test_a_name_that_is_not_kebab_case_is_refused_with_one_that_is(
    here: Path, refusal_of: Callable[..., list[str]], name: str, near: str
) -> None:
    (problem,) = refusal_of("--", name)
    assert problem == f"the name '{name}' is not kebab-case, such as '{near}'"
    assert everything_below(here) == []


def test_a_family_alone_may_have_underscores(
    capsys: pytest.CaptureFixture[str], refusal_of: Callable[..., list[str]]
) -> None:
    assert run(["new-plugin", "my_llama", "--kind", "family"]) == 0
    assert "ascend-run plugins show my_llama" in capsys.readouterr().out
    (problem,) = refusal_of("my_feature")
    assert "kebab-case" in problem


def test_a_name_that_is_too_long_or_begins_as_distributions_do_is_refused(
    refusal_of: Callable[..., list[str]],
) -> None:
    name, rest = f"ascend-run-{'x' * 40}", "x" * 40
    prefixed, long = refusal_of(name)
    assert prefixed.endswith(f"which the distribution's name adds; use {rest}")
    assert long == f"the name '{name}' has 51 characters; use at most 40"


@pytest.mark.parametrize(
    "taken",
    [
        pytest.param("ulysses", marks=pytest.mark.needs_plugins("ulysses")),
        pytest.param("gloo-free-save", marks=pytest.mark.needs_plugins("gloo-offload")),
        *("cpu", "pretrain", "llama", "gpt"),
    ],
)
def test_a_name_of_ours_is_refused_whatever_the_kind(
    here: Path, refusal_of: Callable[..., list[str]], taken: str
) -> None:
    (problem,) = refusal_of(taken, "--kind", "task")
    assert problem == (
        f"the name '{taken}' is taken: ascend-run 0.1.0 has the plugin '{taken}'; "
        "choose another, or uninstall that one"
    )
    assert everything_below(here) == []


def test_a_name_of_an_installed_package_is_refused(
    install: Install, refusal_of: Callable[..., list[str]]
) -> None:
    offer(install, "relay")
    (problem,) = refusal_of("relay")
    assert "ascend-run-relay 1.0 has the plugin 'relay'" in problem


def test_a_module_that_is_installed_is_refused(
    install: Install, refusal_of: Callable[..., list[str]]
) -> None:
    install("something-else", {}, {"ascend_run_relic/__init__.py": "raise SystemExit"})
    (problem,) = refusal_of("relic")
    assert problem.startswith("the module ascend_run_relic is installed already, in ")


def test_every_problem_is_reported_at_once(
    here: Path, refusal_of: Callable[..., list[str]]
) -> None:
    (here / "full").mkdir()
    (here / "full/notes.txt").touch()
    problems = refusal_of("Ulysses", "--folder", "full")
    assert len(problems) == 2
    assert problems[1] == (
        "the folder full is not empty: it has notes.txt; name another with --folder"
    )
    assert everything_below(here) == ["full", "full/notes.txt"]


def test_a_file_in_the_folders_place_is_refused(
    here: Path, refusal_of: Callable[..., list[str]]
) -> None:
    (here / "ascend-run-my-own").touch()
    (problem,) = refusal_of("my-own")
    assert problem == "ascend-run-my-own exists and is not a folder; name another with --folder"


def test_an_unknown_kind_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new-plugin", "my-own", "--kind", "nothing"]) == 2
    error = capsys.readouterr().err
    assert all(f"'{kind}'" in error for kind in KINDS)


def test_a_seam_chooses_what_is_written_and_the_kind(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new-plugin", "my-own", "--seam", "optimizer"]) == 0
    assert "feature 'my-own'" in capsys.readouterr().out
    assert (here / "ascend-run-my-own/src/ascend_run_my_own/nesterov.py").is_file()
    assert run(["new-plugin", "my_own2", "--seam", "family"]) == 0
    assert "family 'my_own2'" in capsys.readouterr().out


def test_a_seam_of_another_kind_is_refused(
    here: Path, refusal_of: Callable[..., list[str]]
) -> None:
    (problem,) = refusal_of("my-own", "--seam", "attention", "--kind", "task")
    assert problem == "--seam attention is of a feature, not of a task; leave out --kind"
    assert everything_below(here) == []


def test_a_folder_below_a_file_cannot_be_written(
    here: Path, refusal_of: Callable[..., list[str]]
) -> None:
    (here / "file").touch()
    assert refusal_of("my-own", "--folder", "file/x/y") == [
        "Not a directory; name another folder with --folder"
    ]
    assert everything_below(here) == ["file"]


@pytest.mark.parametrize("failing", range(1, 10))
@pytest.mark.parametrize("folder", ["above/new", "empty"])
def test_a_full_disk_leaves_nothing_behind(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal_of: Callable[..., list[str]],
    folder: str,
    failing: int,
) -> None:
    """The n-th file cannot be written, or moved to its place."""
    (here / "empty").mkdir()
    for method in ("write_text", "rename"):
        calls = 0
        plain = getattr(Path, method)

        def refuse(path: Path, *args: object, plain=plain, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return plain(path, *args, **kwargs)

        if method == "rename" and failing > 6:
            continue  # so many entries are moved
        with monkeypatch.context() as patched:
            patched.setattr(Path, method, refuse)
            (problem,) = refusal_of("my-own", "--folder", folder)
        assert problem == "No space left on device; name another folder with --folder"
        assert everything_below(here) == ["empty"]


def test_it_imports_no_torch_and_nothing_of_core() -> None:
    code, modules = imported_by(["new-plugin", "my-own"])
    assert code == 0
    assert {top(name) for name in modules} <= {
        *("ascend_run", "attr", "attrs", "click", "jinja2", "markupsafe", "packaging"),
        *("pluggy", "stevedore"),
    }
    assert not [name for name in modules if name.startswith("ascend_run.core.")]


@pytest.mark.parametrize(("option", "values"), [("--kind", KINDS), ("--seam", (*SEAMS,))])
def test_its_kinds_and_seams_complete(option: str, values: tuple[str, ...]) -> None:
    completion = ShellComplete(program, {}, "ascend-run", "_ASCEND_RUN_COMPLETE")
    found = completion.get_completions(["new-plugin", "x", option], "")
    assert [item.value for item in found] == [*values]
