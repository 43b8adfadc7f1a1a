"""Check that a plugin's listeners are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs

from ascend_run.testing.listeners import listener_hooks

from .check import DoesNotApply
from .numbers import tried
from .subject import Subject

STEPS: Final = 2


def are_called(subject: Subject) -> Iterator[str]:
    """Check that each listener is called in a run of two steps with logs, evaluations, a checkpoint
    and an end, and that an error in it names the plugin."""
    if not any(name in listener_hooks() for name in (*subject.facts.hooks, *dir(subject.plugin))):
        raise DoesNotApply("it has no listener")
    scenario = tried(subject)[0]
    trial = attrs.evolve(
        scenario.chosen,
        steps=STEPS,
        counted=False,
        checkpoints=str(subject.scratch / "listening"),
        evaluates=True,
        listens_to=subject.name,
    )
    ranks = subject.means.run(trial, scenario.world_size)
    for name in ranks[0].listener_calls:
        if not any(rank.listener_calls[name] for rank in ranks):
            yield (
                f"{scenario}, {name} is never called in a run with logs, evaluations, a checkpoint "
                "and an end; is it marked with @hookimpl?"
            )
    for name in sorted({name for rank in ranks for name in rank.unnamed_errors}):
        yield f"{scenario}, an error in {name} does not name '{subject.manifest.name}'"
