"""The walk through the code in docs/architecture.md names what is there: each file, and each class,
function, hook and setting, in the files that the walk passes."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

import ascend_run
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.prepare.config.schema import all_options

PACKAGE: Final = Path(ascend_run.__file__).parent
PAGE: Final = PACKAGE.parent / "docs/architecture.md"
HEADING: Final = "## Following five values through the code\n"
NUM_VALUES: Final = 5
ARGUMENT: Final = "config"
"""Of hooks, which the walk names too."""


def walk() -> str:
    (text,) = re.findall(rf"^{HEADING}(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.DOTALL)
    return str(text)


def spans(text: str) -> Iterator[str]:
    """Code spans, each on one line."""
    for found in re.findall(r"`([^`]+)`", text):
        yield " ".join(found.split())


def wrong(text: str) -> Iterator[str]:
    """Yield what a walk names that is not there."""
    passed: list[Path] = []
    folder = PurePosixPath()
    unplaced = []
    for span in spans(text):
        path, _, name = span.partition(": ")
        if "/" in path or path.endswith(".py"):  # without a folder: beside the one before
            at = PurePosixPath(path) if "/" in path else folder / path
            folder = at if not at.suffix else at.parent
            if not (PACKAGE / at).exists():
                yield f"{at} does not exist"
            elif (PACKAGE / at).is_file():
                passed.append(PACKAGE / at)
                if name and name not in defined([PACKAGE / at]):
                    yield f"{at} has no {name}"
        else:
            unplaced.append(span)
    known = {*defined(passed), *defined_by_megatron(), *hook_points(), *all_options({}), ARGUMENT}
    yield from (f"{name} is in none of the walk's files" for name in unplaced if name not in known)


def defined(files: list[Path]) -> Iterator[str]:
    """Yield functions, classes and ``Class.method`` of files."""
    definition = ast.ClassDef | ast.FunctionDef
    for file in files:
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, definition):
                yield node.name
                inner = node.body if isinstance(node, ast.ClassDef) else []
                yield from (f"{node.name}.{n.name}" for n in inner if isinstance(n, definition))


def defined_by_megatron() -> Iterator[str]:
    """Yield the methods of Megatron's base module, without importing it."""
    megatron = importlib.util.find_spec("megatron")
    assert megatron is not None
    assert megatron.submodule_search_locations is not None
    file = Path(megatron.submodule_search_locations[0], "core/transformer/module.py")
    yield from (name.partition(".")[2] for name in defined([file]) if name.startswith("Megatron"))


def test_the_walk_names_what_is_there() -> None:
    assert [*wrong(walk())] == []


def test_the_walk_follows_each_value_through_several_files() -> None:
    paths = [[*re.findall(r"`[\w/]+\.py", item)] for item in walk().split("\n: ")[1:]]
    assert [len(one) > 1 for one in paths] == [True] * NUM_VALUES


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`prepare/config/redaing.py`", "prepare/config/redaing.py does not exist"),
        ("`prepare/config/reading.py`, `lost.py`", "prepare/config/lost.py does not exist"),
        ("`types/config.py: RunConfg`", "types/config.py has no RunConfg"),
        ("`types/config.py`, `RunConfg`", "RunConfg is in none of the walk's files"),
        ("`types/config.py`, `TrainStep`", "TrainStep is in none of the walk's files"),
        (
            "`core/train/step.py: TrainStep`, `TrainStep.skip`",
            "TrainStep.skip is in none of the walk's files",
        ),
        ("`ascend_btach`", "ascend_btach is in none of the walk's files"),
        ("`model.num_lyers`", "model.num_lyers is in none of the walk's files"),
    ],
)
def test_a_name_that_leads_nowhere_is_found(text: str, problem: str) -> None:
    assert [*wrong(text)] == [problem]
