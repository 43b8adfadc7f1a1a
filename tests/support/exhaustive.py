"""``@pytest.mark.exhaustive``: a test whose cases are a product; the suite runs a covering sample.

The sample has each value of each parameter, or each aspect that ``by`` returns for a case. The
campaign ``suite`` runs the rest. No mark leaves a test function without a case.

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_of_each_dtype_and_each_layout(dtype, layout): ...

    @pytest.mark.exhaustive(by=lambda run: (run.plugin, *run.options.items()))
    @pytest.mark.parametrize("run", RUNS)
    def test_of_each_plugin_and_each_option(run): ...

``--cases`` chooses: ``sample`` (default), ``all``, ``rest``, or a JSON file of ids. Cases that the
command line names, by id or by ``-k``, run in any case.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

MARKER: Final = "exhaustive"
SEED: Final = 0
OPTION: Final = "--cases"
LEFT_OUT: Final = pytest.StashKey[list[str]]()
"""In the config: the ids of the cases that are left to the campaign."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION,
        default="sample",
        metavar="WHICH",
        help="of tests marked as exhaustive: sample (default), all, rest, or a JSON file of ids",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that this session does not run."""
    chosen = config.getoption(OPTION)
    if chosen == "sample" and config.getoption("keyword"):
        chosen = "all"
    if chosen == "all":
        return
    if chosen in ("sample", "rest"):
        drawn = sample(items)
        kept = drawn if chosen == "sample" else {*items} - drawn
        kept |= {item for item in items if "[" in item.nodeid and item.nodeid in config.args}
    elif not Path(chosen).is_file():
        raise pytest.UsageError(
            f"{OPTION}={chosen}: expected sample, all, rest, or a JSON file of test ids"
        )
    else:
        wanted = {*json.loads(Path(chosen).read_text(encoding="utf-8"))}
        kept = {item for item in items if item.nodeid in wanted}
    left = [item for item in items if item not in kept]
    config.stash[LEFT_OUT] = [item.nodeid for item in left] if chosen == "sample" else []
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item in kept]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say how many cases are left out, and how to run them."""
    count = len(config.stash.get(LEFT_OUT, ()))
    return [f"{count} cases are left to the campaign suite ({OPTION}=all)"] if count else []


def sample(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that the suite runs: all without the mark, and a sample of each other."""
    functions: dict[str, dict[str, pytest.Item]] = {}
    drawn = set[pytest.Item]()
    for item in items:
        if item.get_closest_marker(MARKER) is None:
            drawn.add(item)
        else:
            function = item.nodeid.partition("[")[0]
            functions.setdefault(function, {})[item.nodeid] = item
    for cases in functions.values():
        shown = {name: aspects_of(item) for name, item in cases.items()}
        drawn |= {cases[name] for name in covering(shown)}
    return drawn


def aspects_of(item: pytest.Item) -> set[Hashable]:
    """Return what a case shows: of which each must be in the sample."""
    mark = item.get_closest_marker(MARKER)
    assert mark is not None, item.nodeid
    call = getattr(item, "callspec", None)
    if call is None:
        return set()
    by: Callable[..., Iterable[Hashable]] | None = mark.kwargs.get("by")
    if by is None:
        return {(name, repr(value)) for name, value in call.params.items()}
    names = inspect.signature(by).parameters
    return {*by(**{name: call.params[name] for name in names})}


def covering(shown: Mapping[str, Iterable[Hashable]]) -> list[str]:
    """Return cases that together show every aspect: in each step the one with most new aspects;
    of equals, which comes first is drawn.

    Args:
        shown: Test id -> its aspects.
    """
    left = {name: {*aspects} for name, aspects in sorted(shown.items(), key=_drawn)}
    showing: dict[Hashable, list[set[Hashable]]] = {}
    for aspects in left.values():
        for aspect in aspects:
            showing.setdefault(aspect, []).append(aspects)
    chosen = [next(iter(left))] if not showing else []
    while showing:
        best = max(left, key=lambda name: len(left[name]))
        chosen.append(best)
        for aspect in [*left[best]]:
            for aspects in showing.pop(aspect):
                aspects.remove(aspect)
    return chosen


def _drawn(entry: tuple[str, Any]) -> str:
    return hashlib.sha256(f"{SEED} {entry[0]}".encode()).hexdigest()
