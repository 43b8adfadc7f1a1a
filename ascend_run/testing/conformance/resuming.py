"""Check that a run resumed from a checkpoint is equal to an uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.plugin_api.hook_kinds import Point
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.testing.listeners import listener_hooks
from ascend_run.testing.runtime import RankOutcome, Trial, load_runtime

from .footprint import footprints
from .numbers import tried
from .scenarios import Scenario
from .subject import Subject

SAVED_STEPS: Final = 3
"""Odd, so that what a plugin does every second step is not due again right after it."""
ALL_STEPS: Final = 5
_DROPOUTS: Final[tuple[Mapping[str, object], ...]] = (
    {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1},
    {"model.hidden_dropout": 0.1},
    {},
)
"""A resumed run must draw the same masks as an uninterrupted one. The first that the plugin
supports is used."""


def resumes(subject: Subject) -> Iterator[str]:
    """Check that three steps, a checkpoint and two more steps are bitwise equal to five steps; on
    two ranks as well, if it has state of its own. And that a run without the plugin loads the
    checkpoint or rejects it with a message."""
    first, *others = tried(subject)
    more = [other for other in others if other.world_size > 1] if _may_have_state(subject) else []
    unsteady = _unsteady_readings(subject)
    for scenario in (first, *more[:1]):
        yield from _resumed(subject, scenario, unsteady)


def _resumed(subject: Subject, scenario: Scenario, unsteady: set[str]) -> Iterator[str]:
    chosen, run = _with_dropout(subject, scenario), subject.means.run
    resumed_folder = str(subject.scratch / f"resumed on {scenario.world_size}")
    one_folder = str(subject.scratch / f"uninterrupted on {scenario.world_size}")
    uninterrupted = run(_until(chosen, ALL_STEPS, one_folder), scenario.world_size)
    run(_until(chosen, SAVED_STEPS, resumed_folder), scenario.world_size)
    resumed = run(_until(chosen, ALL_STEPS, resumed_folder), scenario.world_size)
    for rank, (one, other) in enumerate(zip(resumed, uninterrupted, strict=True)):
        for problem in (*_differences(one, other), *_other_readings(one, other, unsteady)):
            yield f"{scenario}, rank {rank}, {problem}"
    if scenario.without != scenario.chosen:
        yield from _without_it(subject, scenario, resumed_folder)


def _may_have_state(subject: Subject) -> bool:
    points = hook_points()
    hooks = subject.facts.hooks & points.keys()
    of_state = {hook for hook in hooks if points[hook].point in (Point.OPTIMIZER, Point.CHECKPOINT)}
    return bool(of_state or hooks & listener_hooks())


def _unsteady_readings(subject: Subject) -> set[str]:
    """Names of logged values that differ between two equal runs, such as times. Also lets the
    imports of a first run, which may draw random numbers, happen."""
    return {
        name
        for rank in footprints(subject)
        for one, other in zip(rank.first.readings, rank.second.readings, strict=True)
        for name in {*one, *other}
        if one.get(name) != other.get(name)
    }


def _with_dropout(subject: Subject, scenario: Scenario) -> Trial:
    for dropout in _DROPOUTS:
        trial = attrs.evolve(scenario.chosen, config={**scenario.chosen.config, **dropout})
        if not subject.means.examine(trial, scenario.world_size).problems:
            return trial
    return scenario.chosen


def _until(trial: Trial, step: int, folder: str) -> Trial:
    return attrs.evolve(trial, steps=step, counted=False, checkpoints=folder)


def _differences(resumed: RankOutcome, uninterrupted: RankOutcome) -> Iterator[str]:
    """A message for each difference of the two runs."""
    import torch

    for step, (loss, expected) in enumerate(
        zip(resumed.losses, uninterrupted.losses[SAVED_STEPS:], strict=True), start=SAVED_STEPS + 1
    ):
        if loss != expected:
            yield f"the loss of step {step} is {loss!r}, expected {expected!r} as without resuming"
    for key in sorted({*resumed.state, *uninterrupted.state}):
        if key not in resumed.state or key not in uninterrupted.state:
            yield f"{key} is saved by only one of the resumed and the uninterrupted run"
        elif not torch.equal(resumed.state[key], uninterrupted.state[key]):
            yield f"{key} differs from the uninterrupted run"
    for name in sorted({*resumed.values, *uninterrupted.values}):
        saved, wanted = resumed.values.get(name), uninterrupted.values.get(name)
        if saved != wanted:
            yield f"the checkpoint's '{name}' is {saved!r}, expected {wanted!r} as without resuming"


def _other_readings(
    resumed: RankOutcome, uninterrupted: RankOutcome, unsteady: set[str]
) -> Iterator[str]:
    """A message for each logged value of a plugin that differs."""
    for step, (one, other) in enumerate(
        zip(resumed.readings, uninterrupted.readings[SAVED_STEPS:], strict=True), SAVED_STEPS + 1
    ):
        for name in sorted({*one, *other} - unsteady):
            if one.get(name) != other.get(name):
                yield (
                    f"the logged '{name}' of step {step} is {one.get(name)!r}, expected "
                    f"{other.get(name)!r} as without resuming"
                )


def _without_it(subject: Subject, scenario: Scenario, folder: str) -> Iterator[str]:
    trial = _until(scenario.without, ALL_STEPS + 1, folder)
    if subject.means.examine(trial, scenario.world_size).problems:
        return  # this layout needs the plugin, whatever the checkpoint holds
    for result in subject.means.job(run_or_reject, scenario.world_size, trial):
        if isinstance(result, str) and not result.strip():
            yield f"{scenario}: a run without it rejects the checkpoint without a reason"


def run_or_reject(trial: Trial) -> RankOutcome | str:
    """Run a trial; return its result or the user's error message. A job of the pool."""
    try:
        return load_runtime().run(trial)
    except AscendRunError as error:
        return str(error)
