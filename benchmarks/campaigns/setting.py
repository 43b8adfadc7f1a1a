"""A model, a layout and a config in which sets of features run; examined without torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.prepare.prepare import resolve_run
from ascend_run.testing.kit import raw_config
from ascend_run.testing.parity import Case
from ascend_run.testing.runtime import Examined

from .features import EXCHANGE, IN_SETS, catalogue, config_of, exchanges, numerics_of, settled


@attrs.frozen
class Completed:
    """A set with the features that it lacks in a setting."""

    plugins: tuple[str, ...]
    """Features under test."""
    beside: tuple[str, ...]
    """A plugin for context parallelism, if the layout needs one and the set has none."""
    examined: Examined


@attrs.frozen(kw_only=True)
class Setting:
    """A model, a layout and a config in which sets of features run."""

    model: str
    layout: Mapping[str, int]
    config: Mapping[str, Any]

    def examine(self, names: Sequence[str]) -> Examined:
        """Return whether a run with these features can start; imports no torch."""
        case = Case(
            plugins=tuple(names),
            model=self.model,
            layout=self.layout,
            config={**config_of(names), **self.config},
            options=IN_SETS,
        )
        raw = raw_config(case.trial(names, steps=0, sharded=True))
        try:
            run = resolve_run(raw, catalogue(), case.world_size)
        except AscendRunError as error:
            return Examined(error.problems or (error.headline,))
        return Examined(tuple(run.problems()), frozenset(run.idle))

    def complete(self, names: Sequence[str]) -> Completed:
        """Add the features without which a set cannot be compared, and examine it.

        In a layout that splits the sequence, a set without an exchange gets one: ``ulysses``, or
        another one if the set cannot run with that. On one rank, a set in which all features change
        the model would be compared with itself, so another feature is added. If no addition can
        run, the first one is returned.
        """
        plugins = tuple(names)
        if "cp" in self.layout and not exchanges(plugins):
            ways = [(plugins, (other,)) for other in _exchanges()]
        elif not self.layout and {*map(numerics_of, plugins)} == {Numerics.MODEL}:
            others = [name for name in settled() if numerics_of(name) is not Numerics.MODEL]
            ways = [((*plugins, other), ()) for other in others]
        else:
            ways = [(plugins, ())]
        tried: list[Completed] = []
        for under_test, beside in ways:
            found = self.examine((*under_test, *beside))
            tried.append(Completed(under_test, beside, found))
            if not found.problems:
                return tried[-1]
        return tried[0]


@functools.cache
def _exchanges() -> tuple[str, ...]:
    """Features that exchange the sequence; the usual one first."""
    found = [name for name in settled() if exchanges((name,))]
    return tuple(sorted(found, key=lambda name: name != EXCHANGE))
