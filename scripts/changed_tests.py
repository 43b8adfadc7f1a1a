"""Run the tests that a change can affect, according to the imports of the tree.

python -m scripts.changed_tests                # what differs from HEAD, or else the last commit
python -m scripts.changed_tests main --list    # since a commit; only list the files

A test file is affected if it imports a changed module, directly or indirectly, or names one in a
string (for another process to import). A package's ``__init__.py`` runs before every module below
it, and so affects them; another file affects the modules of its folder, or of the nearest folder
above that has some. Plugins are not imported by other modules: a plugin that is affected runs its
suite, the tests of its group, its cases in ``tests/contract``, and, if a file of its own has
changed, the test files that name it in a string, except for other plugins' suites. A change of the
package runs the tests that read all sources; a change of a common dependency runs all tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from configparser import ConfigParser
from pathlib import Path
from typing import Final

import attrs
import click

from scripts.import_graph import FOLDERS, Module, dotted, read_modules

ROOT: Final = Path(__file__).parent.parent
CONTRACT: Final = "tests/contract"
NO_CASES: Final = 5
"""What pytest returns where ``-k`` leaves no test of the files."""
OF_ALL: Final = frozenset({"pyproject.toml", "constraints.txt", "tests/conftest.py"})
"""Files that every test depends on."""
ABOUT_SOURCES: Final = frozenset(
    f"{CONTRACT}/test_{name}.py"
    for name in (
        "field_words",
        "forwards",
        "imports",
        "kernel_names",
        "mappings",
        "options_are_read",
        "patches",
        "size",
        "types",
        "walk",
    )
)
"""Tests that read the source of every module, with no case of its own for a plugin."""
SETUP: Final = "setup.cfg"
MANIFESTS: Final = "ascend_run.manifests"
"""The entry points of it name data, not plugins."""
OF_SETUP: Final = ("tests/registry/", f"{CONTRACT}/test_plugins.py", f"{CONTRACT}/test_imports.py")
"""Tests of the list of plugins, by the start of their path."""
WITHOUT_TESTS: Final = ("docs/", "changelog/", "README.md", "CHANGELOG.md", "benchmarks/results/")
"""Files that only quick tests of pages and results read."""
OF_PAGES: Final = frozenset({f"{CONTRACT}/test_docs.py", f"{CONTRACT}/test_walk.py"})
"""Tests of what pages say."""


@attrs.frozen
class Tree:
    """The Python files of a checkout."""

    modules: Mapping[str, Module]
    """Path relative to the root -> module."""
    plugins: Mapping[str, str]
    """Name of a plugin -> its folder, or its module's path without ``.py``."""

    @classmethod
    def read(cls, root: Path, folders: Iterable[str] = FOLDERS) -> Tree:
        """Parse all files; import nothing."""
        return cls(read_modules(root, folders), _plugins(root / SETUP))

    def grown(self, changed: Iterable[str]) -> set[str]:
        """Return the changed files and the modules that depend on one without importing it."""
        found = {*changed}
        for file in [*found]:
            if file.endswith("/__init__.py"):
                found |= self._below(Path(file).parent)
            elif not file.endswith(".py") and not _is_prose(file):
                found |= self._readers(file)
        return found

    def reached_by(self, changed: Iterable[str]) -> set[str]:
        """Return all files that the changed ones can affect, including themselves."""
        users = self._users()
        reached: set[str] = set()
        waiting = [file for file in changed if file in self.modules]
        while waiting:
            file = waiting.pop()
            if file not in reached:
                reached.add(file)
                waiting += users[file]
        return reached

    def plugins_in(self, files: Iterable[str]) -> set[str]:
        """Return the names of the plugins whose folder or module the files are in."""
        found = [*files]
        return {
            name
            for name, folder in self.plugins.items()
            if any(is_in_plugin(file, folder) for file in found)
        }

    def naming(self, names: Iterable[str]) -> set[str]:
        """Return test files that name one of the plugins, as a word in a string.

        Suites of other plugins are left out: they use it in combination, which ``tests/contract``
        covers.
        """
        wanted = set(names)
        return {
            file
            for file, module in self.modules.items()
            if file.startswith("tests/")
            and not file.startswith("tests/plugins/")
            and any(wanted & words(text) for text in module.strings)
        }

    def used(self) -> dict[str, set[str]]:
        """Return file -> files that it imports, or whose module it names in a string."""
        files = {dotted(file): file for file in self.modules}
        used: dict[str, set[str]] = {}
        for file, module in self.modules.items():
            named = {text.partition(":")[0] for text in module.strings if "." in text}
            used[file] = {files[target] for target in (module.imports | named) & files.keys()}
        return used

    def _below(self, folder: Path) -> set[str]:
        return {file for file in self.modules if file.startswith(f"{folder}/")}

    def _readers(self, data: str) -> set[str]:
        """Modules that may read a file: that of its name, else those of the nearest folder."""
        if (same_name := str(Path(data).with_suffix(".py"))) in self.modules:
            return {same_name}
        for folder in [*Path(data).parents][:-1]:
            if found := {file for file in self.modules if Path(file).parent == folder}:
                return found
        return set()

    def _users(self) -> dict[str, list[str]]:
        """File -> files that use it."""
        users: dict[str, list[str]] = defaultdict(list)
        for file, targets in self.used().items():
            for target in targets:
                users[target].append(file)
        return users


def _plugins(setup: Path) -> dict[str, str]:
    config = ConfigParser()
    config.read(setup, encoding="utf-8")
    groups = config["options.entry_points"].items()
    lines = "\n".join(text for group, text in groups if group != MANIFESTS).splitlines()
    points = (line.split(" = ") for line in lines if " = ascend_run.plugins." in line)
    return {name: value.partition(":")[0].replace(".", "/") for name, value in points}


def is_in_plugin(file: str, folder: str) -> bool:
    """Return whether a file is a plugin's, by a value of ``Tree.plugins``."""
    return file == f"{folder}.py" or file.startswith(f"{folder}/")


def words(text: str) -> set[str]:
    return set(text.replace(",", " ").replace("=", " ").replace(".", " ").split())


def reached_tests(tree: Tree, changed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the test files to run, and the plugins whose cases in ``tests/contract`` to run."""
    files = {*changed}
    if OF_ALL & files:
        return ["tests"], []
    grown = tree.grown(files)
    reached = tree.reached_by(grown)
    plugins = tree.plugins_in(reached)
    reached |= tree.naming(tree.plugins_in(grown))
    chosen = {file for file in reached if _is_test(file)}
    if plugins:  # a plugin has its cases in most of these files, which are selected by its name
        whole = tree.reached_by(file for file in grown if not tree.plugins_in([file])) | files
        chosen = {file for file in chosen if not file.startswith(CONTRACT) or file in whole}
    chosen |= tree.modules.keys() & _by_folder(tree, files, plugins)
    return sorted(chosen), sorted(plugins)


def _by_folder(tree: Tree, files: set[str], plugins: Iterable[str]) -> set[str]:
    """Return the test files that no import leads to."""
    folders = {tree.plugins[name] for name in plugins}
    found = {file for file in tree.modules if file.startswith(tuple(map(_suite, folders)))}
    groups = {_suite(str(Path(folder).parent)) for folder in folders}
    found |= {file for file in tree.modules if f"{Path(file).parent}/" in groups}
    if SETUP in files:
        found |= {file for file in tree.modules if file.startswith(OF_SETUP)}
    if any(map(_is_prose, files)):
        found |= OF_PAGES
    if any(file.startswith("ascend_run/") and file.endswith(".py") for file in files):
        found |= ABOUT_SOURCES
    return {*filter(_is_test, found)}


def _is_prose(file: str) -> bool:
    return file.startswith(WITHOUT_TESTS)


def _is_test(file: str) -> bool:
    return file.startswith("tests/") and Path(file).name.startswith("test_")


def _suite(folder: str) -> str:
    """Folder of the tests of a plugin, or of a group of plugins."""
    return f"tests/{folder.removeprefix('ascend_run/')}/"


def changed_files(root: Path, base: str | None) -> list[str]:
    """Return files that differ from a commit, including untracked ones.

    Args:
        base: None: HEAD, or the commit before it if nothing differs from HEAD.
    """
    untracked = _git(root, "ls-files", "--others", "--exclude-standard")
    found = sorted({*_git(root, "diff", "--name-only", base or "HEAD"), *untracked})
    return found or (_git(root, "diff", "--name-only", "HEAD~1") if base is None else [])


def _git(root: Path, *words: str) -> list[str]:
    process = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=60)
    if process.returncode:
        raise click.UsageError(process.stderr.strip())
    return process.stdout.splitlines()


@click.command()
@click.argument("base", required=False)
@click.option("--list", "lists", is_flag=True, help="Only print the files.")
def command(base: str | None, lists: bool) -> None:
    """Run the tests that the changes since BASE can affect."""
    changed = changed_files(ROOT, base)
    files, plugins = reached_tests(Tree.read(ROOT), changed)
    click.echo(f"{len(changed)} files changed; {len(files)} test files", err=True)
    runs = [files] if files else []
    if plugins:
        twice = [f"--ignore={file}" for file in files if file.startswith(f"{CONTRACT}/")]
        runs.append([CONTRACT, "-k", " or ".join(plugins), *twice])
    for words in runs:
        click.echo(" ".join(words))
    if not lists:
        options = ("-n", "2", "--dist", "loadfile", "-q")
        codes = {
            subprocess.run([sys.executable, "-m", "pytest", *options, *words], cwd=ROOT).returncode
            for words in runs
        }
        sys.exit(max(codes - {NO_CASES}, default=0))


if __name__ == "__main__":
    command()
