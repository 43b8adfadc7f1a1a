"""The sets of features in which every pair runs that can run, for each kind of layout."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, Final

import attrs

from ascend_run.plugin_api import Numerics
from ascend_run.prepare.conflicts import closure
from ascend_run.registry.pairs import exclusion
from ascend_run.testing.runtime import Examined

from .covering import Items
from .examined_sets import ExaminedSets, examined_sets
from .features import LAYOUTS, catalogue, generations, numerics_of, settled
from .setting import Completed, Setting

NUM_LAYERS: Final = {"model.num_layers": 4}
RECOMPUTED: Final = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}
IN_EACH_LAYOUT: Final[Sequence[Mapping[str, Any]]] = ({}, RECOMPUTED)


@attrs.frozen
class SettingSets:
    """The sets of one setting."""

    setting: Setting
    sets: tuple[Completed, ...]
    refused: Mapping[Items, str]
    """Minimal sets that planning refuses -> why."""


@functools.cache
def all_sets() -> tuple[SettingSets, ...]:
    """Return the sets of every layout, without and with full recompute."""
    chosen = ((setting, settled()) for setting in settings())
    # Only a set in which all are bitwise is compared bitwise.
    first = chain.from_iterable((_bitwise(names), names) for names in generations())
    return tuple(sets_of(chosen, needs=requirements(), first=[*first]))


def _bitwise(names: Sequence[str]) -> Sequence[str]:
    return [name for name in names if numerics_of(name) is Numerics.BITWISE]


def settings(more: Mapping[str, Any] | None = None) -> Iterator[Setting]:
    """Yield the setting of every layout, without and with full recompute.

    Args:
        more: Config keys of each.
    """
    for model, layout in LAYOUTS:
        for recompute in IN_EACH_LAYOUT:
            config = {**NUM_LAYERS, **recompute, **(more or {})}
            yield Setting(model=model, layout=layout, config=config)


def sets_of(
    chosen: Iterable[tuple[Setting, Sequence[str]]],
    *,
    needs: Mapping[str, Items],
    first: Sequence[Sequence[str]] = (),
) -> Iterator[SettingSets]:
    """Yield the sets of each setting.

    Args:
        chosen: Settings, each with the features over which its sets run.
        needs: Feature -> itself and those that are enabled with it.
        first: Features that have sets of their own, before those of all.
    """
    hints: dict[Items, None] = {}
    for setting, items in chosen:
        found, completed = _sets_in(setting, items, needs, first, tuple(hints))
        sets = tuple(completed[frozenset(names)] for names in found.sets)
        hints |= dict.fromkeys((*found.refused, *sorted(found.apart, key=sorted)))
        yield SettingSets(setting, sets, found.refused)


def _sets_in(
    setting: Setting,
    items: Sequence[str],
    needs: Mapping[str, Items],
    first: Sequence[str],
    hints: Sequence[Items],
) -> tuple[ExaminedSets, Mapping[Items, Completed]]:
    made: dict[Items, Completed] = {}

    def examine(names: Items) -> Examined:
        if names not in made:
            made[names] = setting.complete(sorted(names))
        return made[names].examined

    found = examined_sets(
        items,
        excluded_pairs(),
        examine,
        needs=needs,
        first=first,
        hints=[hint for hint in hints if hint <= {*items}],
    )
    return found, made


@functools.cache
def excluded_pairs() -> frozenset[Items]:
    """Return the pairs of features that resolution never allows."""
    classes = catalogue().load(settled())
    pairs = combinations(sorted(classes), 2)
    return frozenset(
        frozenset(pair) for pair in pairs if exclusion(classes[pair[0]], classes[pair[1]])
    )


@functools.cache
def requirements() -> dict[str, Items]:
    """Return feature -> itself and all features that it requires, directly or not."""
    classes = catalogue().load(settled())
    return {name: closure([name], classes) for name in classes}
