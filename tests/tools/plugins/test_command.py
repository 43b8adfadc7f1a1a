from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.tools.plugins.import_time import ImportTime
from ascend_run.tools.plugins.listing import Listed, markdown_table
from tests.support.fake_distributions import plugin_source
from tests.support.installed import Install, offer, offer_declared

CANARY = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"

OPTIONS = """
import attrs
from ascend_run.plugin_api import Condition, LegacyFlag, Manifest, Numerics, Support, hookimpl

@attrs.frozen(kw_only=True)
class Base:
    inherited: str = "x"
    '''From the class below.'''

@attrs.frozen(kw_only=True)
class Options(Base):
    every: int = 1
    '''One layer in this many.

    Unit: layers.'''
    names: tuple[str, ...] = attrs.field(factory=tuple)
    path: str

class Plugin:
    '''Does nothing, at length.'''

    manifest = Manifest(
        name="ring", aliases=("circle",), summary="a ring",
        requires=("base", Condition("a.b", ">", 1)),
        conflicts={"wheel": "both cut"}, after=("base",), numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL, "npu": Support.EMULATED, "cuda": Support.REFUSED},
        legacy_flags=(LegacyFlag(flag="--ring"),), source="arXiv:0000.00000",
    )
    config_class = Options

    @hookimpl
    def ascend_layer(self): ...
"""


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments) == 0
    return capsys.readouterr().out


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(output_of(capsys, "plugins", "--json"))}


def test_ours_are_listed_with_their_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    row = listed(capsys)["cpu"]

    assert row["kind"] == "platform"
    assert row["claims"] == ["platform"]
    assert row["platforms"]["cpu"] == "real"
    assert row["distribution"] == "ascend-run"
    assert row["broken"] is None


@pytest.mark.parametrize("command", [["plugins"], ["plugins", "list"]], ids=" ".join)
def test_the_table_shows_every_plugin_with_kind_platforms_and_version(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    lines = output_of(capsys, *command).splitlines()

    (cpu,) = [line for line in lines if line.startswith("cpu ")]
    assert "platform" in cpu
    assert cpu.endswith("ascend-run 0.1.0")
    assert lines[0].split()[:3] == ["name", "kind", "summary"]


def test_a_package_that_no_one_named_is_listed_without_running(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = offer(install, "ring", CANARY + plugin_source("ring"), version="3.1")

    row = listed(capsys)["ring"]
    table = output_of(capsys, "plugins")

    assert (row["distribution"], row["version"]) == ("ascend-run-ring", "3.1")
    assert row["summary"] is None
    assert "ascend-run-ring 3.1" in table
    assert not (folder / "ran").exists()


def test_a_static_manifest_is_listed_without_running_the_package(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {
        "ascend_run.plugins": dict.fromkeys(("circle", "ring"), "fake_ring:Plugin"),
        "ascend_run.manifests": {"ring": "fake_ring:manifest.toml"},
    }
    declared = "[ring]\nsummary = 'a ring of ranks'\nrequires_api = '>=0,<2'\nlevel = 1\n"
    files = {"fake_ring/__init__.py": CANARY, "fake_ring/manifest.toml": declared}
    folder = install("ascend-run-ring", points, files)

    rows = listed(capsys)
    (line,) = (row for row in output_of(capsys, "plugins").splitlines() if "ring of ranks" in row)

    assert "circle" not in rows
    assert rows["ring"]["aliases"] == ["circle"]
    assert (rows["ring"]["summary"], rows["ring"]["level"]) == ("a ring of ranks", 1)
    assert rows["ring"]["requires_api"] == ">=0,<2"
    assert rows["ring"]["platforms"] is None
    assert " ".join(line.split()) == (
        "ring, circle feature a ring of ranks - - - ascend-run-ring 1.0"
    )
    assert not (folder / "fake_ring/ran").exists()


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ("summary = 'x'\nrequires_api = '>=1'", "requires plugin API >=1 and this is API 0"),
        ("summary = 'x'", "fake_ring:manifest.toml, that is invalid"),
    ],
)
def test_a_static_manifest_that_excludes_this_api_is_listed_as_broken(
    install: Install, capsys: pytest.CaptureFixture[str], declared: str, reason: str
) -> None:
    folder = offer_declared(install, "ring", declared, CANARY)

    assert reason in listed(capsys)["ring"]["broken"]
    assert reason in output_of(capsys, "plugins")
    assert not (folder / "fake_ring/ran").exists()


def test_a_listing_imports_no_plugin_and_no_attrs() -> None:
    """Third-party or built-in, since the import of a plugin takes longer than all else."""
    program = (
        "import sys; from ascend_run.entrypoints.cli import run\n"
        "assert run(['plugins']) == run(['plugins', '--json']) == 0\n"
        "print([m for m in sys.modules if m.startswith('ascend_run.plugin') or m == 'attr'])"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert process.stdout.splitlines()[-1] == "[]"


def test_a_hundred_packages_take_a_few_files_each(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """The work is counted: files that are opened, and imports."""
    opened: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open":
            opened.append(str(arguments[0]))

    declared = "summary = 'a plugin'\nrequires_api = '==0'"
    names = [f"ring-{number}" for number in range(100)]
    for name in names:
        folder = offer_declared(install, name, declared, CANARY)
    sys.addaudithook(watch)
    modules = {*sys.modules}
    rows = listed(capsys)
    watching = False

    assert {*names} <= rows.keys()
    assert not [name for name in {*sys.modules} - modules if name.startswith("fake_")]
    own = Counter(Path(path).name for path in opened if str(folder.parent) in path)
    # To find the distribution, and to read its plugins.
    assert own == {"entry_points.txt": 200, "METADATA": 100, "manifest.toml": 100}


def test_showing_a_package_is_the_consent_to_run_it(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = offer(install, "ring", CANARY + plugin_source("ring"))

    assert "a plugin named ring" in output_of(capsys, "plugins", "show", "ring")
    assert (folder / "ran").exists()


def test_what_is_broken_is_listed_with_its_reason(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("ring-one", {"ascend_run.plugins": {"ring": "a:A"}})
    install("ring-two", {"ascend_run.plugins": {"ring": "b:B"}})
    bad = install("bad-metadata", {"ascend_run.plugins": {"x": "x:X"}})
    entry_points = bad / "bad_metadata-1.0.dist-info/entry_points.txt"
    entry_points.write_text("[ascend_run.plugins]\nno equals sign here\n")

    table = output_of(capsys, "plugins")

    assert "broken (affects only runs that use them):" in table
    assert "ring-one 1.0" in table
    assert "ring-two 1.0" in table
    assert "bad-metadata: its entry points cannot be read" in table


def test_one_plugin_is_shown_with_all_that_it_says(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {"ring": "fake_ring:Plugin", "circle": "fake_ring:Plugin"}
    install("rings", {"ascend_run.plugins": points}, {"fake_ring.py": OPTIONS})

    page = output_of(capsys, "plugins", "show", "circle")
    shown = json.loads(output_of(capsys, "plugins", "show", "circle", "--json"))

    assert "  hook checks passed\n" in page
    assert shown["name"] == "ring"
    assert shown["requires"] == ["base", "a.b > 1"]
    assert shown["hooks"] == {"ascend_layer": "wrapper"}
    assert shown["options"] == [
        {
            "name": "inherited",
            "type": "str",
            "default": "'x'",
            "help": "From the class below.",
        },
        {
            "name": "every",
            "type": "int",
            "default": "1",
            "help": "One layer in this many. Unit: layers.",
        },
        {"name": "names", "type": "tuple[str, ...]", "default": "()", "help": ""},
        {"name": "path", "type": "str", "default": "required", "help": ""},
    ]
    for words in (
        "Does nothing, at length.",
        "rounding",
        "wheel: both cut",
        "npu (emulated), cuda (refused)",
        "--ring",
        "every: int = 1",
        "One layer in this many.",
    ):
        assert words in page, words


def test_problems_of_hooks_are_shown_with_exit_code_1(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = """
    @hookimpl
    def ascend_layers(self): ...

    @hookimpl
    def ascend_norm(self, layer_index): ...
"""
    offer(install, "ring", plugin_source("ring", "claims=(Claim.NORM,)") + hooks)

    assert run(["plugins", "show", "ring", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["hook_problems"]
    assert run(["plugins", "show", "ring"]) == 1
    page = capsys.readouterr().out

    assert len(problems) == 3
    assert "hook checks" not in page
    for problem, words in zip(
        problems,
        (
            "has Claim.NORM in its manifest; only implementing ascend_norm",
            "ascend_layers, which is not a hook; did you mean ascend_layer?",
            "ascend_norm with the argument 'layer_index'; its arguments are: config, device",
        ),
        strict=True,
    ):
        assert words in problem
        assert f"    {problem}\n" in page


def test_a_slow_import_is_named_with_the_packages_that_take_most(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {"ascend_run.plugins": {"ring": "fake_ring:Plugin"}}
    files = {
        "fake_ring.py": "import fake_part.inner, time; time.sleep(0.15)\n" + plugin_source("ring"),
        "fake_part/__init__.py": "",
        "fake_part/inner.py": "import time; time.sleep(0.2)",
    }
    install("ascend-run-ring", points, files)

    shown = json.loads(output_of(capsys, "plugins", "show", "ring", "--json"))["import_time"]
    page = output_of(capsys, "plugins", "show", "ring")

    assert shown["slow_above_milliseconds"] == 100
    assert shown["packages"]["fake_part"] > 200
    assert shown["packages"]["fake_ring"] > 150, "the plugin's own module is timed too"
    (line,) = (line for line in page.splitlines() if "slow (above 100 ms): " in line)
    assert re.search(r": .*fake_part \d+ ms", line)
    assert re.search(r": .*fake_ring \d+ ms", line)


def test_a_module_that_cannot_be_imported_alone_is_shown(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(install, "ring", "import sys; assert 'pytest' in sys.modules\n" + plugin_source("ring"))

    assert "import      fails alone" in output_of(capsys, "plugins", "show", "ring")


def test_only_a_slow_import_names_packages() -> None:
    assert str(ImportTime(100.0, {"ring": 99.0})) == "100 ms"
    assert str(ImportTime(101.0, {"ring": 99.0})) == (
        "101 ms, slow (above 100 ms): ring 99 ms; import and compute in the hooks what only they "
        "need"
    )


def test_an_unknown_name_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "show", "pretrian"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot load pretrian:\n  unknown plugin 'pretrian'; nearest:")


def test_the_markdown_table_leads_each_of_ours_to_its_page(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(install, "relay")

    lines = output_of(capsys, "plugins", "--markdown").splitlines()

    start = "| [cpu](docs/plugins/platforms/cpu.md) | platforms |"
    assert any(line.startswith(start) for line in lines)
    assert not any("relay" in line.split("|")[1] for line in lines if line.startswith("|"))


def test_platforms_are_marked_by_how_they_run_there() -> None:
    row = Listed(
        name="x",
        aliases=(),
        kind="feature",
        distribution="ascend-run",
        version="1",
        value="x:X",
        first_party=True,
        category="operators",
        summary="s",
        numerics="bitwise",
        platforms={"cpu": "real", "npu": "emulated", "cuda": "unverified", "tpu": "refused"},
    )

    assert "| cpu npu~ cuda? |" in markdown_table([row])
