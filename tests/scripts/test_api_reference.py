"""The reference of the plugin API is up to date, complete, and what help() shows."""

from __future__ import annotations

import pydoc
import re
import tomllib
from pathlib import Path, PurePosixPath

import griffe
import pytest
from click.testing import CliRunner

import ascend_run
from ascend_run import plugin_api, testing
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.tools.new_plugin.names import Names
from ascend_run.tools.new_plugin.rendering import package_files
from scripts import api_reference
from scripts.api_names import PAGES, PUBLIC
from scripts.api_reference import (
    DOCS,
    EXAMPLES,
    MODULE,
    PACKAGED,
    ROOT,
    command,
    listed_names,
)
from scripts.api_text import Sources, described, documentation, parsed, public_members
from tests.support.installed import Install
from tests.support.installed import install as install

SOURCES = Sources(ROOT)


def test_every_page_is_up_to_date() -> None:
    result = CliRunner().invoke(command, ["--check"])
    assert result.exit_code == 0, result.output


def test_a_page_that_is_out_of_date_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    other = DOCS / "errors.md"
    monkeypatch.setattr(api_reference, "files", lambda: {other: "something else"})
    result = CliRunner().invoke(command, ["--check"])
    assert result.exit_code == 1
    assert "docs/api/errors.md is out of date" in result.output


def test_every_hook_has_its_number_its_callers_and_its_arguments() -> None:
    text = (DOCS / "hooks.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections] == [
        f"{number}. `{name}`" for number, name in enumerate(hook_points(), 1)
    ]
    for section, name in zip(sections, hook_points(), strict=True):
        assert re.search(r"Called\s+by\s+`[a-z_.]+", section), name
        assert f"```\n{name}(" in section


def test_every_public_name_has_its_documentation() -> None:
    for module, name in sorted(PUBLIC):
        found = SOURCES.resolve(module, name)
        assert found.docstring is not None, f"{module}: {name}"


def undocumented(found: griffe.Object) -> list[str]:
    """The fields and methods of a class without text; ``Args`` of the class documents fields."""
    if not isinstance(found, griffe.Class):
        return []
    of_class = found.docstring.value if found.docstring else ""
    return [
        f"{found.name}.{member.name}"
        for member in public_members(found)
        if f"\n    {member.name}: " not in of_class and not _text(member)
    ]


def _text(member: griffe.Object | griffe.Alias) -> object:
    """Text of a field or method; that of a hook is its specification's."""
    if isinstance(member, griffe.Attribute):
        return documentation(member)
    return member.docstring or member.name in hook_points()


def test_every_field_and_method_of_a_public_record_has_text() -> None:
    found = [undocumented(SOURCES.resolve(module, name)) for module, name in sorted(PUBLIC)]
    assert [name for names in found for name in names] == []


def test_lines_of_the_pages_are_short_outside_of_tables() -> None:
    for page in DOCS.glob("*.md"):
        lines = page.read_text().splitlines()
        assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == [], page


def test_hooks_describe_the_arguments_that_they_share() -> None:
    first = (DOCS / "hooks.md").read_text().partition("\n## ")[0]
    words = {word.strip(";,") for word in first.split()}
    assert words >= {"`config`", "`device`", "`groups`", "`role`", "`layer_index`"}


def test_a_name_of_two_modules_is_listed_with_its_module() -> None:
    (testing_page,) = (page for page in PAGES if page.name == "testing")
    listed = [*listed_names(testing_page)]
    assert len({*listed}) == len(listed)
    assert {"testing.run", "cli.run"} <= {*listed}


def test_help_of_the_package_and_of_the_api_leads_to_the_reference() -> None:
    for module in (ascend_run, plugin_api):
        assert f'help("{MODULE}")' in str(module.__doc__)


def test_a_record_shows_each_field_with_type_default_and_documentation() -> None:
    source = '''
@attrs.frozen
class Record:
    """A record."""

    size: int = attrs.field(default=3, validator=attrs.validators.ge(0))
    """Its size. Unit: bytes."""
    names: tuple[str, ...] = attrs.field(factory=tuple)
    width: int = attrs.field(
        default=1
    )  #: Of ``size``.

    def grow(self, by: int, *, twice: bool = False) -> Record:
        """Return a larger one.

        Args:
            by: How much
                larger.
        """
'''
    record = parsed("module", Path("module.py"), source).members["Record"]
    assert isinstance(record, griffe.Class)
    text = described(record)
    assert "- `size: int = 3`: Its size. Unit: bytes.\n" in text
    assert "- `names: tuple[str, ...] = tuple()`\n" in text
    assert "- `width: int = 1`: Of `size`.\n" in text
    assert undocumented(record) == ["Record.names"]
    assert "grow(by: int, *, twice: bool = False) -> Record" in text
    assert "- by: How much\n  larger." in text


@pytest.mark.parametrize("name", ["hooks", "records", "errors"])
def test_help_shows_the_page(name: str) -> None:
    text = (PACKAGED / f"{name}.md").read_text()
    shown = pydoc.plain(pydoc.render_doc(f"{MODULE}.{name}"))
    for line in text.splitlines()[2:]:
        assert line.strip() in shown


def test_the_pages_are_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"][MODULE] == ["*.md"]


def test_the_first_page_has_the_whole_code_of_three_plugins_which_train(install: Install) -> None:
    page = (DOCS / "README.md").read_text()
    for _, name, kind, seam in EXAMPLES:
        files = package_files(Names.of(name, kind, seam))
        sources = {
            str(path.relative_to("src")): text
            for path, text in files.items()
            if path.is_relative_to("src")
        }
        assert all(text in page for path, text in sources.items() if path.endswith("__init__.py"))
        project = tomllib.loads(files[PurePosixPath("pyproject.toml")])["project"]
        install(project["name"], project["entry-points"], sources)
    plain = testing.run(steps=2).losses
    for _, name, _, _ in EXAMPLES:
        assert testing.run(name, steps=2).losses != plain, name
