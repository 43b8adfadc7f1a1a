"""What a run with the plugin touches, while it stands and after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from ascend_run.plugin_api.testing.parity import compare
from ascend_run.plugin_api.testing.runtime import RankOutcome, Trial, load_runtime

from .check import DoesNotApply
from .numbers import tried
from .snapshot import attributes, changed_settings, made_in, replaced, settings
from .subject import Subject


@attrs.frozen
class Footprint:
    """What one rank saw of two runs with a plugin, after one without."""

    touched: tuple[str, ...]
    """Attributes of torch and Megatron that it replaced without declaring a patch."""
    left: tuple[str, ...]
    """What differs after the first run, beside those."""
    first: RankOutcome
    second: RankOutcome


def patches_are_declared(subject: Subject) -> Iterator[str]:
    """It replaces nothing of torch or Megatron but by ``ascend_patches``."""
    if subject.facts.kind == "platform":
        raise DoesNotApply("a platform's device may stand in for torch's own while it is active")
    for name in sorted({name for seen in footprints(subject) for name in seen.touched}):
        yield f"it replaces {name}; return a Patch from ascend_patches, which is undone"


def leaves_no_trace(subject: Subject) -> Iterator[str]:
    """After the run, everything that can be seen of the process is what it was."""
    for what in sorted({what for seen in footprints(subject) for what in seen.left}):
        yield f"it leaves changed: {what}; undo it in ascend_after_run, or use a hook that undoes"


def runs_twice(subject: Subject) -> Iterator[str]:
    """A second run in the same process is the first one, bit for bit."""
    seen = footprints(subject)
    second, first = [rank.second for rank in seen], [rank.first for rank in seen]
    yield from (f"in its second run, {problem}" for problem in compare(second, first, 0.0))


def footprints(subject: Subject) -> list[Footprint]:
    """By rank; looked at once for all checks."""
    return subject.once("footprint", partial(_look, subject))


def _look(subject: Subject) -> list[Footprint]:
    place = tried(subject)[0]
    seen: list[Footprint] = subject.means.job(
        footprint,
        place.world_size,
        subject.name,
        attrs.evolve(
            place.on_one_rank.without, steps=1, checkpoints=str(subject.scratch / "plain")
        ),
        attrs.evolve(place.chosen, steps=1, checkpoints=str(subject.scratch / "once")),
        attrs.evolve(place.chosen, steps=1, checkpoints=str(subject.scratch / "again")),
    )
    if any(footprint.touched or footprint.left for footprint in seen):
        subject.means.pool_of_ranks().close()  # these processes are no longer what they were
    return seen


def footprint(plugin: str, plain: Trial, once: Trial, again: Trial) -> Footprint:
    """A job: run without the plugin and twice with it, and look at this process in between."""
    runtime = load_runtime()
    standing: list[dict[str, object]] = []

    def look() -> None:
        standing.append(attributes())

    runtime.run(plain)  # what any first run imports and sets for good
    before = attributes()
    runtime.run(plain, look)
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
        left=(*changed_settings(set_before, set_after), *sorted(remaining & declared)),
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
