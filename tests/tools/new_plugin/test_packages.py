"""What is written for each kind: sound files, found by discovery, and true to the kit.

That they install and pass on ranks is shown from wheels, by ``make third-party``.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import click
import pytest

from ascend_run.entrypoints.cli import program, run
from ascend_run.entrypoints.commands import TRAIN
from ascend_run.registry.discovery import discover
from ascend_run.registry.static_manifest import static_manifest
from ascend_run.testing.conformance import CHECKS, Means, Subject
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import load_runtime
from ascend_run.tools.new_plugin.names import KIND_OF, LONGEST, Names
from ascend_run.tools.new_plugin.rendering import TEMPLATES, compatible_range, package_files
from ascend_run.tools.new_plugin.seams import KINDS, SEAMS, template_of
from scripts.api_names import PUBLIC
from tests.support.installed import Install

ROOT = Path(__file__).parent.parent.parent.parent
LONG = "a-name-of-as-many-characters-as-are-allo"
NAMES = ("x", "manifest", LONG)
"""The shortest, one that a template uses itself, and the longest."""
WRITTEN = {template_of(kind, None): (kind, None) for kind in KINDS}
WRITTEN |= {seam: (kind, seam) for seam, kind in SEAMS.items()}
"""Folder of templates -> kind and seam."""
each = pytest.mark.parametrize("template", WRITTEN)
WITHOUT_RANKS = (
    *("KIT-LOAD", "KIT-NAMES", "KIT-MANIFEST", "KIT-HOOKS", "KIT-IMPORT"),
    *("KIT-OPTIONS", "KIT-STATE"),
)


def files_of(name: str, template: str) -> Mapping[PurePosixPath, str]:
    return package_files(Names.of(name, *WRITTEN[template]))


def project_of(files: Mapping[PurePosixPath, str]) -> dict[str, Any]:
    return tomllib.loads(files[PurePosixPath("pyproject.toml")])


def no_ranks() -> GlooPool:
    raise AssertionError("this check was not to need ranks")


@pytest.fixture
def installed(install: Install, template: str) -> str:
    """The name of a new plugin, put where discovery and imports find it."""
    name = f"fresh-{template}"
    files = files_of(name, template)
    sources = {
        str(path.relative_to("src")): text
        for path, text in files.items()
        if path.is_relative_to("src")
    }
    project = project_of(files)["project"]
    install(project["name"], project["entry-points"], sources)
    return name


def test_the_longest_name_is_the_longest_allowed() -> None:
    assert len(LONG) == LONGEST


def test_linters_find_nothing_in_any_package_whatever_its_name(tmp_path: Path) -> None:
    for template in WRITTEN:
        for name in NAMES:
            for path, text in files_of(name, template).items():
                target = tmp_path / template / name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_template_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = TEMPLATES.parent
    patterns = project["tool"]["setuptools"]["package-data"]["ascend_run.tools.new_plugin"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path for path in TEMPLATES.rglob("*") if path.is_file()} == packed


@each
def test_it_is_linted_as_we_lint(template: str) -> None:
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    theirs = project_of(files_of("x", template))["tool"]["ruff"]
    del ours["lint"]["per-file-ignores"], theirs["lint"]["isort"]
    assert theirs == ours


@each
def test_it_has_what_a_package_needs(template: str) -> None:
    files = files_of("my-own", template)
    for path in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        ".gitignore",
        "src/ascend_run_my_own/__init__.py",
        "src/ascend_run_my_own/manifest.toml",
        "src/ascend_run_my_own/py.typed",
        "tests/test_my_own.py",
    ):
        assert PurePosixPath(path) in files
    assert [str(path) for path in files if path.suffix == ".md"] == ["README.md"], "one user page"
    packed = project_of(files)["tool"]["setuptools"]["package-data"]["ascend_run_my_own"]
    assert packed == ["manifest.toml", "py.typed"]
    texts = [*map(str, files), *files.values()]
    assert not [text for text in texts if "{{" in text or "MODULE" in text or "SNAKE" in text]


@each
@pytest.mark.parametrize("name", NAMES)
def test_no_class_takes_the_name_of_another_thing(name: str, template: str) -> None:
    for path, text in files_of(name, template).items():
        if path.suffix != ".py":
            continue
        nodes = ast.parse(text).body
        nodes += [inner for node in nodes if isinstance(node, ast.If) for inner in node.body]
        imported = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert not imported & {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def imports_of(text: str) -> set[tuple[str, str]]:
    """(module, name) of everything that a module imports from ascend-run, in functions too."""
    nodes = [*ast.walk(ast.parse(text))]
    found = {
        (node.module or "", alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and not node.level
        for alias in node.names
    }
    found |= {(alias.name, "") for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return {(module, name) for module, name in found if module.split(".")[0] == "ascend_run"}


@each
def test_it_imports_public_names_only(template: str) -> None:
    """Those of the API reference; ``from ascend_run import testing`` imports a page of it."""
    modules = {module for module, _ in PUBLIC}
    for path, text in files_of("my-own", template).items():
        if path.suffix == ".py":
            imported = imports_of(text)
            hidden = {pair for pair in imported - PUBLIC if ".".join(pair) not in modules}
            assert hidden == set(), path


def test_an_import_of_a_hidden_name_is_found() -> None:
    source = "import ascend_run.core\ndef f():\n    from ascend_run.core.run import x\n"
    assert imports_of(source) == {("ascend_run.core", ""), ("ascend_run.core.run", "x")}


@each
def test_its_page_names_commands_and_options_that_exist(template: str) -> None:
    context = click.Context(program, info_name="ascend-run")
    for path, text in files_of("my-own", template).items():
        if path.suffix != ".md":
            continue
        lines = [line.strip() for line in text.splitlines() if line.startswith("    ascend-run ")]
        for words in (line.split()[1:] for line in lines):
            known = words[0] in program.list_commands(context)
            name, rest = (words[0], words[1:]) if known else (TRAIN, words)
            command = program.get_command(context, name)
            assert command is not None
            command.make_context(name, rest, parent=context)


@each
def test_it_is_found_and_has_not_run(installed: str, template: str) -> None:
    candidate = discover()[installed]
    assert candidate.kind is KIND_OF[WRITTEN[template][0]]
    assert candidate.distribution == f"ascend-run-{installed}"
    declared, problem = static_manifest(candidate)
    assert declared is not None
    assert not problem
    assert candidate.value.partition(":")[0] not in sys.modules


@each
def test_the_kits_checks_that_need_no_ranks_pass(installed: str, template: str) -> None:
    subject = Subject(installed, Means(load_runtime(), no_ranks))
    checks = {check.code: check for check in CHECKS}
    for code in WITHOUT_RANKS:
        assert checks[code].judge(subject).problems == (), code


@each
def test_a_run_with_it_can_be_planned(
    installed: str, template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = Names.of(installed, *WRITTEN[template]).chosen.split()
    sizes = ("num_layers=1", "hidden_size=8", "num_attention_heads=2", "vocab_size=16")
    model = [f"model.{size}" for size in sizes]
    assert run(["plan", *chosen, "data.train=any", *model]) == 0, capsys.readouterr().err
    assert installed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.1.0", ">=0.1.0,<0.2"),
        ("0.12.3.dev4", ">=0.12.3,<0.13"),
        ("1.4.2", ">=1.4.2,<2"),
        ("2.0.0rc1", ">=2.0.0,<3"),
    ],
)
def test_releases_with_another_api_are_excluded(version: str, expected: str) -> None:
    assert compatible_range(version) == expected
