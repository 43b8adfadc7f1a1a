"""Check what a run with the plugin changes in the process, during the run and after it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.testing.parity import compare
from ascend_run.testing.runtime import RankOutcome, Trial, load_runtime
from ascend_run.types.declarations import Numerics

from .check import DoesNotApply
from .numbers import tried
from .snapshot import (
    PROCESS_GROUPS,
    Attributes,
    attributes,
    changed_settings,
    made_in,
    replaced,
    settings,
)
from .subject import Subject

_RANDOM: Final = "rng/"
"""Prefix of the states of random generators in a checkpoint."""
_OBJECTS: Final = 20_000


@attrs.frozen
class Footprint:
    """What one rank observed in two runs with a plugin, after one without."""

    touched: tuple[str, ...]
    """Attributes of other packages that it replaced without declaring a patch."""
    kept: tuple[str, ...]
    """Those of them, and of its declared patches, that were not undone."""
    left: tuple[str, ...]
    """Settings that differ after the first run."""
    plain: RankOutcome
    """The second run without it."""
    first: RankOutcome
    second: RankOutcome


def patches_are_declared(subject: Subject) -> Iterator[str]:
    """Check that it replaces attributes of torch, Megatron and ascend-run only by
    ``ascend_patches``."""
    if subject.facts.kind == "platform":
        raise DoesNotApply("a platform may replace parts of torch while its device is active")
    for name in sorted({name for seen in footprints(subject) for name in seen.touched}):
        yield f"it replaces {name}; return a Patch from ascend_patches, which is undone"


def leaves_no_trace(subject: Subject) -> Iterator[str]:
    """Check that a run restores the state of the process."""
    is_platform = subject.facts.kind == "platform"
    found = set[str]()
    for seen in footprints(subject):
        # Undeclared replacements are reported by KIT-PATCH, which does not apply to platforms.
        found |= {*seen.left, *(n for n in seen.kept if is_platform or n not in seen.touched)}
    own_groups = "ascend_process_groups" in subject.facts.hooks  # created by the kernel
    for what in sorted(found):
        if own_groups and what.startswith(PROCESS_GROUPS):
            continue
        yield (
            f"it does not restore: {what}; undo the change in ascend_after_run, or use a hook that "
            "undoes it"
        )


def runs_twice(subject: Subject) -> Iterator[str]:
    """Check that a second run in the same process is bitwise equal to the first one, and so is what
    its checkpoint holds, except the states of random generators, from which imports may draw.

    A gradient may differ in bits that do not reach the weights in one step; they reach the
    optimizer's state.
    """
    seen = footprints(subject)
    second, first = [rank.second for rank in seen], [rank.first for rank in seen]
    yield from (f"in its second run, {problem}" for problem in compare(second, first, 0.0))
    for rank, (one, other) in enumerate(zip(second, first, strict=True)):
        for key in sorted(one.state.keys() & other.state.keys()):
            if not key.startswith(_RANDOM) and not _equal(one.state[key], other.state[key]):
                yield f"in its second run, {key} of the checkpoint differs on rank {rank}"


def draws_nothing(subject: Subject) -> Iterator[str]:
    """Check that a bitwise plugin does not consume random numbers.

    Otherwise it would change dropout masks; trials of parity have no dropout.
    """
    if subject.manifest.numerics is not Numerics.BITWISE or subject.facts.kind == "platform":
        raise DoesNotApply("it does not declare to be bitwise")
    if tried(subject)[0].world_size > 1:
        return  # random numbers depend on the layout
    (seen,) = footprints(subject)
    for name, held in seen.plain.state.items():
        generator = name.partition(" ")[0].rpartition("/")[2]
        # Imports in a first run draw from Python's generator.
        if not name.startswith(_RANDOM) or generator.startswith("python"):
            continue
        if not _equal(seen.second.state.get(name), held):
            yield f"it draws from the generator {generator}; use a generator of its own"


def _equal(one: Any, other: Any) -> bool:
    import torch

    return one is not None and torch.equal(one, other)


def footprints(subject: Subject) -> list[Footprint]:
    """Return the footprints by rank; computed once for all checks."""
    return subject.once("footprint", partial(_look, subject))


def _look(subject: Subject) -> list[Footprint]:
    scenario = tried(subject)[0]

    def one_step(trial: Trial, folder: str) -> Trial:
        return attrs.evolve(
            trial, steps=1, counted=False, checkpoints=str(subject.scratch / folder)
        )

    seen: list[Footprint] = subject.means.job(
        footprint,
        scenario.world_size,
        subject.name,
        one_step(scenario.on_one_rank.without, "plain"),
        one_step(scenario.chosen, "once"),
        one_step(scenario.chosen, "again"),
    )
    if any(footprint.touched or footprint.kept or footprint.left for footprint in seen):
        subject.means.pool_of_ranks().close()  # the state of these processes has changed
    return seen


def footprint(plugin: str, plain: Trial, once: Trial, again: Trial) -> Footprint:
    """Run without the plugin and twice with it; compare the process state. A job of the pool."""
    runtime = load_runtime()
    standing: list[Attributes] = []

    def look() -> None:
        standing.append(attributes())

    runtime.run(plain)  # a first run imports modules and sets process state permanently
    before, earlier = attributes(), settings()
    without = runtime.run(plain, look)
    of_every_run = replaced(before, standing.pop())
    before, set_before = attributes(), settings()
    first = runtime.run(once, look)
    after, set_after = attributes(), settings()
    found = runtime.describe(plugin).plugin
    declared = _patch_targets(found)
    during = replaced(before, standing.pop()) - of_every_run - declared
    remaining = replaced(before, after)
    # Changes that an earlier run in this process has left show no difference.
    remaining |= made_in(_folder(found), before)
    gaps = _scattered_objects()
    second = runtime.run(again)
    del gaps
    return Footprint(
        touched=tuple(sorted(during | (remaining - declared))),
        kept=tuple(sorted(remaining)),
        left=tuple(changed_settings(earlier, set_before, set_after)),
        plain=without,
        first=first,
        second=second,
    )


def _scattered_objects() -> list[object]:
    """Return objects between which memory is free at random addresses, so that a run beside them
    has another order of addresses than the run before."""
    import torch

    generator = random.Random(0)
    made: list[object] = [torch.empty(generator.randrange(64)) for _ in range(_OBJECTS)]
    generator.shuffle(made)
    del made[: _OBJECTS // 2]
    return made


def _patch_targets(plugin: type[Any]) -> set[str]:
    """Dotted names of the targets of a plugin's ``ascend_patches``."""
    if not hasattr(plugin, "ascend_patches"):
        return set()
    options = getattr(plugin, "config_class", None)
    instance = plugin() if options is None else plugin(options())
    return {patch.target.replace(":", ".") for patch in instance.ascend_patches()}


def _folder(plugin: type[Any]) -> str:
    """Folder of the plugin's package, or file of its module."""
    file = Path(getattr(sys.modules[plugin.__module__], "__file__", None) or "nowhere")
    return str(file.parent) if file.name == "__init__.py" else str(file)
