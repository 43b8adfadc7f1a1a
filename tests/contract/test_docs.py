"""What README and docs say to type, to open and to write in a file is there.

Every ``ascend-run`` command line parses, with options that exist; every path into the repository
exists and holds the name that stands behind it; every block of TOML is a config; every ``make``
target is one.
"""

from __future__ import annotations

import functools
import itertools
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import click
import pytest

from ascend_run.entrypoints.cli import program
from ascend_run.entrypoints.commands import TRAIN, commands
from ascend_run.plugin_api.errors import AscendRunError, ConfigError
from ascend_run.prepare.config.loading import build_config
from ascend_run.prepare.config.reading import read_raw
from ascend_run.prepare.config.schema import SECTIONS, TOP_LEVEL, all_options
from ascend_run.prepare.prepare import prepare
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "ascend_run"
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")])
CODE_FOLDERS = ("", "ascend_run", "ascend_run/plugin_api", "ascend_run/core")
"""Where a path in code type may begin."""
MADE_BY_RUNS = ("data/", "runs/", "checkpoints/", "build/", "exported")

OF_THE_DEMO = tuple(tomllib.loads((ROOT / "examples/demo.toml").read_text())["enable"])
SHOWN = {
    "README.md": OF_THE_DEMO,
    "docs/checkpoints.md": ("gloo-offload",),
    "docs/cost-model.md": OF_THE_DEMO,
    "docs/plan.md": OF_THE_DEMO,
    "docs/plugins/platforms/npu.md": ("gmm",),
}
"""Page -> the features whose settings or files it shows; without one of them it must be
rewritten, and is not read until then."""


def pages() -> Iterator[Any]:
    """A parameter for each page."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        marks = pytest.mark.needs_plugins(*SHOWN.get(name, ()))
        yield pytest.param(page, id=name, marks=marks)


pytestmark = pytest.mark.parametrize("page", [*pages()])


@attrs.frozen
class Block:
    """Lines that are set as code."""

    lines: range
    """In the page, from 0, with its fences."""
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks, and runs of lines indented by four after an empty line."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        if match := re.match(r"```(\w*)$", line):
            end = next(n for n in range(number + 1, len(lines)) if lines[n] == "```")
            yield Block(range(number, end + 1), match[1], "\n".join(lines[number + 1 : end]))
            number = end + 1
        elif line.startswith("    ") and (number == 0 or not lines[number - 1].strip()):
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield Block(range(number, end), "", "\n".join(text[4:] for text in lines[number:end]))
            number = end
        else:
            number += 1


def prose(page: Path) -> str:
    """The page without its blocks."""
    lines = page.read_text(encoding="utf-8").splitlines()
    taken = {number for block in blocks(page) for number in block.lines}
    return "\n".join(line for number, line in enumerate(lines) if number not in taken)


# -- command lines ----------------------------------------------------------------------------


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words after ``ascend-run``, without comments and with continued lines joined."""
    in_blocks = (line for b in blocks(page) for line in b.text.replace("\\\n", " ").splitlines())
    in_prose = re.findall(r"`(ascend-run [^`]+)`", prose(page))
    for line in itertools.chain(in_blocks, in_prose):
        if line.strip().startswith("ascend-run "):
            words = shlex.split(line.replace("\\|", "|"), comments=True)[1:]
            yield [word for word in words if word != "..."]


@functools.cache
def known_keys() -> frozenset[str]:
    """Every config key of any built-in plugin."""
    catalogue = discover()
    ours = [name for name, candidate in catalogue.items() if candidate.first_party]
    classes = {
        plugin.manifest.name: getattr(plugin, "config_class", None)
        for plugin in catalogue.load_each(ours).classes.values()
    }
    return frozenset({*all_options(classes), *TOP_LEVEL})


@functools.cache
def sources() -> str:
    """All of the package's code."""
    return "".join(path.read_text() for path in ROOT.glob("ascend_run/**/*.py"))


@pytest.fixture(scope="session")
def made_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Configs of examples that make what they read, after that was made, by their paths."""
    folder = tmp_path_factory.mktemp("qwen")
    runpy.run_path(str(ROOT / "examples/qwen_data.py"))["main"](folder)
    text = (ROOT / "examples/qwen.toml").read_text().replace('"data/qwen/', f'"{folder}/')
    (folder / "qwen.toml").write_text(text)
    return {"examples/qwen.toml": folder / "qwen.toml"}


def check_command(words: list[str], made_files: Mapping[str, Path]) -> None:
    """Parse it as the program would, down to the last option.

    Raises:
        click.UsageError: It has an option or a command that does not exist.
    """
    name, rest = (words[0], words[1:]) if words[:1] and "=" not in words[0] else (TRAIN, words)
    if name.startswith("-"):
        name, rest = TRAIN, words
    context = click.Context(program, info_name="ascend-run")
    command = program.get_command(context, name)
    if command is None:
        raise click.UsageError(f"no command {name!r}")
    if not isinstance(command, click.Group) and rest and not {"--help", "-h"} & {*rest}:
        parsed = command.make_context(name, [*rest], parent=context)
        for override in parsed.params.get("overrides", ()):
            if (key := override.partition("=")[0]) not in known_keys():
                raise click.UsageError(f"no setting {key!r}")
        file = parsed.params.get("file")
        if name in (TRAIN, "plan") and file is not None and (ROOT / file).is_file():
            chosen = {n: parsed.params[n] for n in ("overrides", "enable", "platform", "task")}
            file = made_files.get(str(file), ROOT / file)
            prepare(file, world_size=parsed.params.get("nproc"), **chosen)


def test_its_command_lines_are_understood(page: Path, made_files: dict[str, Path]) -> None:
    problems = []
    for words in command_lines(page):
        try:
            check_command(words, made_files)
        except click.MissingParameter:  # a mention, not a whole command line
            continue
        except (click.UsageError, AscendRunError) as error:
            problems.append(f"ascend-run {shlex.join(words)}: {error}")
    assert problems == []


def test_the_settings_that_it_names_exist(page: Path) -> None:
    key = re.compile(rf"((?:{'|'.join(SECTIONS[:-1])}|plugins\.[\w-]+)\.(\w+))(?:=.*)?")
    found = {m for text in re.findall(r"`([^`]+)`", prose(page)) if (m := key.fullmatch(text))}
    files = ("toml", "py", "safetensors", "json", "jsonl", "html", "md")
    named = {match[1] for match in found if match[2] not in files}
    events = {name for name in named if f'"{name}"' in sources()}  # of the log
    assert sorted(named - known_keys() - events) == []


def test_the_options_that_it_names_exist(page: Path) -> None:
    """But for pages of plugins, which name the flags of other systems."""
    if page.parent.parent.name == "plugins":
        return
    context = click.Context(program, info_name="ascend-run")
    known = {
        "--only",
        "--missing",
        "--pairs",
        "--quick",
        "--list",
        "--plot",
        "--draft",
        *("--fresh", "--limit", "--new", "--workers", "--ascend-timeout"),
        *("--nproc-per-node", "--ntasks-per-node"),
        *("--dist-ckpt-strictness", "--finetune", "--quick-geglu"),
        *("--swiglu", "--rope-scaling", "--rope-scaling-type"),
    }  # of other programs
    for name in commands():
        command = program.get_command(context, name)
        assert command is not None
        nested = command.commands.values() if isinstance(command, click.Group) else ()
        for one in (command, *nested):
            known |= {word for option in one.params for word in option.opts + option.secondary_opts}
    named = {
        word
        for text in re.findall(r"`([^`]+)`", prose(page))
        for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)
    }
    assert sorted(named - known - {"--help", "--version"}) == []


def test_its_make_targets_exist(page: Path) -> None:
    targets = {*re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    in_code = [line for block in blocks(page) for line in block.text.splitlines()]
    in_prose = re.findall(r"`(make [^`]+)`", prose(page))
    named = {
        match[1] for line in (*in_code, *in_prose) if (match := re.match(r"make ([\w-]+)", line))
    }
    assert named <= targets


# -- paths ------------------------------------------------------------------------------------


def braces(path: str) -> Iterator[str]:
    """``a{b,c}`` -> ``ab``, ``ac``."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", path)
    if match is None:
        yield path
        return
    for choice in match[1].split(","):
        yield from braces(path[: match.start()] + choice + path[match.end() :])


def named_paths(page: Path) -> Iterator[tuple[str, str]]:
    """(path, name in the file or nothing) of code spans that look like paths of this tree."""
    folders = "|".join(path.name for top in (ROOT, PACKAGE) for path in top.iterdir())
    for text in re.findall(r"`([^`]+)`", prose(page)):
        path, _, name = " ".join(text.split()).partition(": ")
        is_path = re.fullmatch(rf"(?:{folders})/[\w./{{}},<>*-]*", path)
        if is_path and not path.startswith(MADE_BY_RUNS) and "<" not in path:
            yield path, name if re.fullmatch(r"\w+", name) else ""


def test_the_paths_that_it_names_exist(page: Path) -> None:
    problems = []
    for named, name in named_paths(page):
        for path in braces(named):
            found = [p for folder in CODE_FOLDERS if (p := ROOT / folder / path).exists()]
            if not found:
                problems.append(f"{path} does not exist")
            elif name and not re.search(rf"(def|class) {name}\b", found[0].read_text()):
                problems.append(f"{path} has no {name}")
    assert problems == []


def test_its_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


# -- configs ----------------------------------------------------------------------------------


def configs(page: Path) -> Iterator[str]:
    """TOML that speaks of a run: whole blocks, or paragraphs of blocks that hold more."""
    for block in blocks(page):
        whole = _toml(block.text)
        assert whole is not None or block.language != "toml", f"{page}: {block.text} is not TOML"
        parts = [block.text] if whole is not None else re.split(r"\n\s*\n", block.text)
        for part in parts:
            content = _toml(part)
            if content and not {"project", "build-system", "tool"} & content.keys():
                yield part


def _toml(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def test_its_configs_load(page: Path, tmp_path: Path) -> None:
    """A part of a config may lack what every run must have; it has nothing that no run may."""
    catalogue = discover()
    problems = []
    for text in configs(page):
        file = tmp_path / "block.toml"
        file.write_text(text)
        raw = read_raw(file)
        names = {*raw.enable, *(key.split(".")[1] for key in raw.values if key[:8] == "plugins.")}
        classes = catalogue.load([*names, raw.platform, raw.task, raw.family])
        assert all(catalogue[name].kind is Kind.FEATURE for name in raw.enable)
        options = {name: getattr(plugin, "config_class", None) for name, plugin in classes.items()}
        try:
            build_config(raw, options, {}, raw.enable)
        except ConfigError as error:
            problems += [wrong for wrong in error.problems if " is missing; expected" not in wrong]
    assert problems == []
