"""Check that a run resumed from a checkpoint is equal to an uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.testing.runtime import RankOutcome, Trial, load_runtime

from .footprint import footprints
from .numbers import tried
from .scenarios import Scenario
from .subject import Subject

SAVED_STEPS: Final = 2
ALL_STEPS: Final = 4
_DROPOUTS: Final[tuple[Mapping[str, object], ...]] = (
    {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1},
    {"model.hidden_dropout": 0.1},
    {},
)
"""A resumed run must draw the same masks as an uninterrupted one. The first that the plugin
supports is used."""


def resumes(subject: Subject) -> Iterator[str]:
    """Check that two steps, a checkpoint and two more steps are bitwise equal to four steps; and
    that a run without the plugin loads the checkpoint or rejects it with a message."""
    scenario = tried(subject)[0]
    footprints(subject)  # imports in a first run may draw random numbers
    chosen, run = _with_dropout(subject, scenario), subject.means.run
    resumed_folder = str(subject.scratch / "resumed")
    one_folder = str(subject.scratch / "uninterrupted")
    uninterrupted = run(_until(chosen, ALL_STEPS, one_folder), scenario.world_size)
    run(_until(chosen, SAVED_STEPS, resumed_folder), scenario.world_size)
    resumed = run(_until(chosen, ALL_STEPS, resumed_folder), scenario.world_size)
    for rank, (one, other) in enumerate(zip(resumed, uninterrupted, strict=True)):
        yield from (f"{scenario}, rank {rank}, {problem}" for problem in _differences(one, other))
    if scenario.without != scenario.chosen:
        yield from _without_it(subject, scenario, resumed_folder)


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
