"""What a run with the plugin touches, while it stands and after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from ascend_run.plugin_api.manifest import Numerics
from ascend_run.plugin_api.testing.parity import compare
from ascend_run.plugin_api.testing.runtime import RankOutcome, Trial, load_runtime

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


@attrs.frozen
class Footprint:
    """What one rank saw of two runs with a plugin, after one without."""

    touched: tuple[str, ...]
    """What others' modules hold that it replaced without declaring a patch."""
    kept: tuple[str, ...]
    """What of that, and of the patches it declares, is not undone."""
    left: tuple[str, ...]
    """Settings that differ after the first run."""
    plain: RankOutcome
    """The second run without it."""
    first: RankOutcome
    second: RankOutcome


def patches_are_declared(subject: Subject) -> Iterator[str]:
    """It replaces nothing of torch, Megatron or ascend-run but by ``ascend_patches``."""
    if subject.facts.kind == "platform":
        raise DoesNotApply("a platform's device may stand in for torch's own while it is active")
    for name in sorted({name for seen in footprints(subject) for name in seen.touched}):
        yield f"it replaces {name}; return a Patch from ascend_patches, which is undone"


def leaves_no_trace(subject: Subject) -> Iterator[str]:
    """After the run, everything that can be seen of the process is what it was."""
    is_platform = subject.facts.kind == "platform"
    found = set[str]()
    for seen in footprints(subject):
        # What no patch declares is KIT-PATCH's, which does not judge platforms.
        found |= {*seen.left, *(n for n in seen.kept if is_platform or n not in seen.touched)}
    own_groups = "ascend_process_groups" in subject.facts.hooks  # the kernel makes them
    for what in sorted(found):
        if own_groups and what.startswith(PROCESS_GROUPS):
            continue
        yield f"it leaves changed: {what}; undo it in ascend_after_run, or use a hook that undoes"


def runs_twice(subject: Subject) -> Iterator[str]:
    """A second run in the same process is the first one, bit for bit."""
    seen = footprints(subject)
    second, first = [rank.second for rank in seen], [rank.first for rank in seen]
    yield from (f"in its second run, {problem}" for problem in compare(second, first, 0.0))


def draws_nothing(subject: Subject) -> Iterator[str]:
    """The random numbers of a run are drawn as without it.

    Dropout would otherwise drop other values; trials of parity are made without.
    """
    if subject.manifest.numerics is not Numerics.BITWISE or subject.facts.kind == "platform":
        raise DoesNotApply("it does not declare that it changes no bit")
    if tried(subject)[0].world_size > 1:
        return  # ranks of another layout draw otherwise anyway
    (seen,) = footprints(subject)
    for name, held in seen.plain.state.items():
        generator = name.partition(" ")[0].rpartition("/")[2]
        # Python's is drawn from by what is imported in a first run.
        if not name.startswith("rng/") or generator.startswith("python"):
            continue
        if not _equal(seen.second.state.get(name), held):
            yield f"it draws from the generator {generator}; let it have one of its own"


def _equal(one: Any, other: Any) -> bool:
    import torch

    return one is not None and torch.equal(one, other)


def footprints(subject: Subject) -> list[Footprint]:
    """By rank; looked at once for all checks."""
    return subject.once("footprint", partial(_look, subject))


def _look(subject: Subject) -> list[Footprint]:
    place = tried(subject)[0]

    def one_step(trial: Trial, folder: str) -> Trial:
        return attrs.evolve(
            trial, steps=1, counted=False, checkpoints=str(subject.scratch / folder)
        )

    seen: list[Footprint] = subject.means.job(
        footprint,
        place.world_size,
        subject.name,
        one_step(place.on_one_rank.without, "plain"),
        one_step(place.chosen, "once"),
        one_step(place.chosen, "again"),
    )
    if any(footprint.touched or footprint.kept or footprint.left for footprint in seen):
        subject.means.pool_of_ranks().close()  # these processes are no longer what they were
    return seen


def footprint(plugin: str, plain: Trial, once: Trial, again: Trial) -> Footprint:
    """A job: run without the plugin and twice with it, and look at this process in between."""
    runtime = load_runtime()
    standing: list[Attributes] = []

    def look() -> None:
        standing.append(attributes())

    runtime.run(plain)  # what any first run imports and sets for good
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
    # An earlier run in this process may have left it, and no difference shows it any more.
    remaining |= made_in(_folder(found), before)
    second = runtime.run(again)
    return Footprint(
        touched=tuple(sorted(during | (remaining - declared))),
        kept=tuple(sorted(remaining)),
        left=tuple(changed_settings(earlier, set_before, set_after)),
        plain=without,
        first=first,
        second=second,
    )


def _patch_targets(plugin: type[Any]) -> set[str]:
    """Dotted names of what a plugin's ``ascend_patches`` replaces."""
    if not hasattr(plugin, "ascend_patches"):
        return set()
    options = getattr(plugin, "config_class", None)
    instance = plugin() if options is None else plugin(options())
    return {patch.target.replace(":", ".") for patch in instance.ascend_patches()}


def _folder(plugin: type[Any]) -> str:
    """Of the plugin's own modules; of a single module, its file."""
    file = Path(getattr(sys.modules[plugin.__module__], "__file__", None) or "nowhere")
    return str(file.parent) if file.name == "__init__.py" else str(file)
