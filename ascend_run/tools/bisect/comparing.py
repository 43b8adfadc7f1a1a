"""Compare a run that enables some of the plugins with the run without them. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.plugin_api import AscendRunError
from ascend_run.prepare.prepare import PreparedRun
from ascend_run.tools.verify.compare.verdict import Check
from ascend_run.tools.verify.judging import judge
from ascend_run.tools.verify.questions import Question, Side
from ascend_run.tools.verify.ranks import Ranks
from ascend_run.tools.verify.sides import Sides, sides_of

from .choices import ENABLED, NOT_ENABLED, Choice, Compared, Kind, State

if TYPE_CHECKING:
    from ascend_run.tools.verify.capture.record import Record

_STEP: Final = re.compile(r"\bstep (\d+)")


class Comparer:
    """Compares sets of plugins; runs without any of them are executed once.

    Args:
        question: Its features are the choices.
        ranks: Executes the runs.

    Raises:
        AscendRunError: The run with all of the features cannot start.
    """

    def __init__(self, question: Question, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sides = sides_of(question)
        self.prepared = self._sides.candidate.prepare()
        """The run with all of the features."""
        self._names = _canonical_names(self.prepared, question.enable)
        self._order = tuple(name for name in self.prepared.resolution.names if name in self._names)
        self._needs = _requirements(self.prepared)
        self.kept = tuple(name for name in self._order if not self._runs_without(name))
        """Features without which the layout cannot run; they are enabled in every run."""
        self.choices = tuple(
            Choice(kind=Kind.PLUGIN, name=name, values=(NOT_ENABLED, ENABLED))
            for name in self._order
            if name not in self.kept
        )
        """The features to search, each after those that it requires."""
        self._references: dict[str, list[Record]] = {}

    def with_needed(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return these features, those that they require and those that the layout needs."""
        return self._closed({*names, *self.kept})

    def __call__(self, names: Sequence[str]) -> Compared:
        """Compare the run that enables these features.

        Raises:
            NoVerdict: A run failed.
        """
        enabled = self.with_needed(names)
        sides = self._with_only(enabled)
        try:
            sides.candidate.prepare()
        except AscendRunError as error:
            return Compared(changes=enabled, state=State.CANNOT_RUN, why=reason_of(error))
        references = [side for side in (sides.plain, sides.same_layout) if side is not None]
        recorded = [(side, self._reference(side)) for side in references]
        verdict = judge(sides, self._ranks(sides.candidate), recorded)
        if verdict.good:
            return Compared(changes=enabled, state=State.AGREES)
        fault = verdict.fault
        return Compared(
            changes=enabled,
            state=State.DIVERGES,
            where="" if fault is None else f"{fault.module} ({fault.phase})",
            step=first_step(verdict.checks),
            why="" if fault is None else fault.why,
        )

    def identity(self) -> dict[str, object]:
        """Return what the results depend on, as JSON values: the request, the content of the config
        file, versions, and the code of the plugins."""
        candidate = self._sides.candidate
        file = "" if candidate.file is None else Path(candidate.file).read_text("utf-8")
        return {
            "run": candidate.as_request(),
            "file": file,
            "versions": versions(),
            "plugins": self.prepared.lock,
        }

    def _reference(self, side: Side) -> list[Record]:
        key = str(attrs.evolve(side, name=""))
        if key not in self._references:
            self._references[key] = self._ranks(side)
        return self._references[key]

    def _closed(self, features: set[str]) -> tuple[str, ...]:
        """With all that they require, in the order of the choices."""
        needed = {other for name in features for other in self._needs[name]} | features
        return tuple(name for name in self._order if name in needed)

    def _runs_without(self, name: str) -> bool:
        """Whether the layout can run without a feature and those that require it."""
        left = tuple(other for other in self._order if name not in {other, *self._needs[other]})
        try:
            self._with_only(left).candidate.prepare()
        except AscendRunError:
            return False
        return True

    def _with_only(self, enabled: Sequence[str]) -> Sides:
        """The runs, each without those choices that are not enabled."""
        dropped = {asked for name, asked in self._names.items() if name not in enabled}

        def only(side: Side) -> Side:
            kept = tuple(name for name in side.enable if name not in dropped)
            return attrs.evolve(side, enable=kept)

        sides = self._sides
        same = sides.same_layout
        return attrs.evolve(
            sides,
            candidate=attrs.evolve(only(sides.candidate), name=", ".join(enabled) or "none"),
            plain=only(sides.plain),
            same_layout=None if same is None else only(same),
            against=None,
            with_dropout=None,
            training_precision=None,
            masks=None,
            resumable=None,
            declared={name: how for name, how in sides.declared.items() if name not in dropped},
            left_out=(),
        )


def reason_of(error: AscendRunError) -> str:
    """Return why a run cannot start, in one line."""
    return (error.problems[0] if error.problems else error.headline).partition("\n")[0]


def versions() -> dict[str, str]:
    """Return the versions that the results depend on."""
    return {name: version(name) for name in ("ascend-run", "torch", "megatron-core")}


def first_step(checks: Iterable[Check]) -> int | None:
    """Return the first step in which a check failed; None if no check tells.

    The first batch, of which all gradients are compared, is that of step 1.
    """
    of_first_batch = ("initial weights", "counts", "loss", "gradients")
    failed = [check for check in checks if not check.passed]
    if any(check.name in of_first_batch for check in failed):
        return 1
    texts = [text for check in failed for text in (check.name, *check.details)]
    return min((int(step) for text in texts for step in _STEP.findall(text)), default=None)


def _canonical_names(prepared: PreparedRun, asked: Sequence[str]) -> dict[str, str]:
    """Canonical name -> the name that was asked for, which may be an alias."""
    return {
        plugin.manifest.name: name
        for name in asked
        for plugin in prepared.resolution.order
        if name in (plugin.manifest.name, *plugin.manifest.aliases)
    }


def _requirements(prepared: PreparedRun) -> dict[str, set[str]]:
    """Canonical name -> all that it requires, directly or not."""
    found: dict[str, set[str]] = {}
    for plugin in prepared.resolution.order:
        direct = {name for name in plugin.manifest.requires if isinstance(name, str)}
        found[plugin.manifest.name] = direct.union(*(found.get(name, set()) for name in direct))
    return found
