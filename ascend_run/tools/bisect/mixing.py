"""Run A with some of the choices of run B. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.tools.verify.building import PROBES
from ascend_run.tools.verify.dropout import without_draws
from ascend_run.tools.verify.layouts import KEYS
from ascend_run.tools.verify.questions import Side

from .choices import Kind
from .recorded_runs import RecordedRun, with_other_code
from .run_choices import AXES, RANKS, choices_between, is_not_executed, option_of, plugin_of
from .search import smallest_failing


class Mixing:
    """Mixes two runs: A with any set of the choices in which B differs.

    Args:
        steps: Optimizer steps of the mixed runs.

    Raises:
        AscendRunError: Run A or run B cannot start here.
    """

    def __init__(self, one: RecordedRun, other: RecordedRun, steps: int) -> None:
        self.one, self.other, self.steps = one, other, steps
        found = [*choices_between(one, other)]
        self._found = {choice.name: choice for choice in found}
        self.prepared = (self.side(()).prepare(), self.side([*self._found]).prepare())
        """The runs of A and of B."""
        self._startable: dict[frozenset[str], bool] = {}
        self._needed = _closed({name: self._needs(name) for name in self._found})
        self.choices = tuple(sorted(found, key=lambda choice: len(self._needed[choice.name])))
        """Each after those that it needs."""

    def with_needed(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return these choices, and those without which they cannot run."""
        needed = {*names}.union(*(self._needed[name] for name in names))
        return tuple(choice.name for choice in self.choices if choice.name in needed)

    def side(self, names: Collection[str]) -> Side:
        """Return run A with these choices of B, as a run of ``verify``.

        It has the settings with which ``verify`` compares runs, except where they are choices.
        """
        mixed = self._values({*names})
        layout = {key: value for key, value in mixed.items() if key in AXES}
        probes = {**PROBES, **(without_draws(mixed) if self._changes_layout else {})}
        fixed = {key: value for key, value in probes.items() if key not in self._found}
        return Side(
            name=f"A with {', '.join(names)} of B" if names else "A",
            world_size=(self.other if RANKS in names else self.one).world_size,
            enable=tuple(self._enabled({*names})),
            values={KEYS["pp"]: 1, **layout, **fixed},
            base={key: value for key, value in mixed.items() if key not in ("enable", *layout)},
            file=None,
            overrides=(),
            platform=(self.other if "platform" in names else self.one).raw.platform,
            task=(self.other if "task" in names else self.one).raw.task,
            steps=self.steps,
        )

    @property
    def tolerant(self) -> tuple[str, ...]:
        """Choices that may change the rounding of a run by design; without any, all of the mixed
        runs must be bitwise equal to A."""
        rounding = {
            plugin.manifest.name
            for prepared in self.prepared
            for plugin in prepared.resolution.order
            if plugin.manifest.numerics is not Numerics.BITWISE
        }
        return tuple(
            choice.name
            for choice in self._found.values()
            if choice.kind is Kind.LAYOUT
            or choice.name == "platform"
            or plugin_of(choice) in rounding
        )

    @property
    def notes(self) -> Iterator[str]:
        """What differs and is not searched."""
        if left_out := [key for key in self._different_keys() if is_not_executed(key)]:
            what = "they start from the first weights, and do not evaluate"
            yield f"without effect on the compared runs, as {what}: {', '.join(left_out)}"
        runs = (self.one, self.other)
        for letter, run, prepared in zip("AB", runs, self.prepared, strict=True):
            if names := with_other_code(run, prepared.lock):
                shown = ", ".join(names)
                yield f"the installed code, which is compared, is not that of run {letter}: {shown}"

    @property
    def _changes_layout(self) -> bool:
        return any(choice.kind is Kind.LAYOUT for choice in self._found.values())

    def _different_keys(self) -> Iterator[str]:
        mine, others = self.one.values, self.other.values
        for key in dict.fromkeys((*mine, *others)):
            if mine.get(key) != others.get(key):
                yield key

    def _values(self, names: set[str]) -> dict[str, Any]:
        """Config key -> value. Options of a plugin that only one of the runs has are this run's."""
        mine, others = self.one.values, self.other.values
        mixed = {}
        for key in dict.fromkeys((*mine, *others)):
            plugin = option_of(key)
            of_other = AXES.get(key, key) in names
            if plugin is not None and plugin not in self.one.plugins:
                of_other = True
            values = others if of_other else mine
            if key in values:
                mixed[key] = values[key]
        return mixed

    def _enabled(self, names: set[str]) -> Iterator[str]:
        mine, others = self.one.raw.enable, self.other.raw.enable
        for name in dict.fromkeys((*mine, *others)):
            if name in (others if name in names else mine):
                yield name

    def _starts(self, names: Collection[str]) -> bool:
        key = frozenset(names)
        if key not in self._startable:
            try:
                self.side(names).prepare()
            except AscendRunError:
                self._startable[key] = False
            else:
                self._startable[key] = True
        return self._startable[key]

    def _needs(self, name: str) -> set[str]:
        """Return a smallest set of other choices with which a choice can start; none if it can
        start alone."""
        others = [other for other in self._found if other != name]
        if self._starts([name]):
            return set()
        return {*smallest_failing(others, lambda some: self._starts([name, *some]))}


def _closed(needs: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Add what the needed choices need."""
    closed = {name: {name, *needed} for name, needed in needs.items()}
    while True:
        wider = {name: found.union(*(closed[n] for n in found)) for name, found in closed.items()}
        if wider == closed:
            return closed
        closed = wider
