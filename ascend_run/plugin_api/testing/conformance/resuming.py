"""A run that is cut in two and goes on from its checkpoint is the run in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.plugin_api.testing.runtime import RankOutcome, Trial, load_runtime

from .footprint import footprints
from .numbers import tried
from .places import Place
from .subject import Subject

HALF: Final = 2
WHOLE: Final = 4
_CHANCE: Final[tuple[Mapping[str, Any], ...]] = (
    {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1},
    {"model.hidden_dropout": 0.1},
    {},
)
"""A resumed run must draw what the whole one would have; what a plugin refuses is left out."""


def resumes(subject: Subject) -> Iterator[str]:
    """Two steps, a save and two steps more are four steps, to the bit; and a run without the
    plugin takes the checkpoint or refuses it with a message."""
    place = tried(subject)[0]
    footprints(subject)  # what is imported in a first run may draw random numbers
    chosen, run = _with_chance(subject, place), subject.means.run
    halves = str(subject.scratch / "halves")
    whole = run(_until(chosen, WHOLE, str(subject.scratch / "whole")), place.world_size)
    run(_until(chosen, HALF, halves), place.world_size)
    resumed = run(_until(chosen, WHOLE, halves), place.world_size)
    for rank, (one, other) in enumerate(zip(resumed, whole, strict=True)):
        yield from (f"{place}, rank {rank}, {problem}" for problem in _unlike(one, other))
    if place.without != place.chosen:
        yield from _without_it(subject, place, halves)


def _with_chance(subject: Subject, place: Place) -> Trial:
    for chance in _CHANCE:
        trial = attrs.evolve(place.chosen, config={**place.chosen.config, **chance})
        if not subject.means.examine(trial, place.world_size).problems:
            return trial
    return place.chosen


def _until(trial: Trial, step: int, folder: str) -> Trial:
    return attrs.evolve(trial, steps=step, counted=False, checkpoints=folder)


def _unlike(resumed: RankOutcome, whole: RankOutcome) -> Iterator[str]:
    """What of a resumed run differs from the whole one."""
    import torch

    for step, (mine, right) in enumerate(
        zip(resumed.losses, whole.losses[HALF:], strict=True), start=HALF + 1
    ):
        if mine != right:
            yield f"the loss of step {step} is {mine!r}, and {right!r} in one piece"
    for key in sorted({*resumed.state, *whole.state}):
        if key not in resumed.state or key not in whole.state:
            yield f"{key} is kept by one of the two runs only"
        elif not torch.equal(resumed.state[key], whole.state[key]):
            yield f"{key} differs from the run in one piece"
    for name in sorted({*resumed.values, *whole.values}):
        kept, expected = resumed.values.get(name), whole.values.get(name)
        if kept != expected:
            yield f"the checkpoint's '{name}' is {kept!r}, and {expected!r} in one piece"


def _without_it(subject: Subject, place: Place, folder: str) -> Iterator[str]:
    trial = _until(place.without, WHOLE + 1, folder)
    if subject.means.examine(trial, place.world_size).problems:
        return  # this layout cannot do without it, whatever the checkpoint holds
    for answer in subject.means.job(run_or_refuse, place.world_size, trial):
        if isinstance(answer, str) and not answer.strip():
            yield f"{place}: a run without it refuses the checkpoint and does not say why"


def run_or_refuse(trial: Trial) -> RankOutcome | str:
    """A job: the trial, or the refusal that a user would read."""
    try:
        return load_runtime().run(trial)
    except AscendRunError as error:
        return str(error)
