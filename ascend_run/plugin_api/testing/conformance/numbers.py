"""What a plugin does to the numbers of a run, held against what its manifest declares."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from ascend_run.plugin_api.hook_kinds import Point
from ascend_run.plugin_api.hook_points import hook_points
from ascend_run.plugin_api.manifest import Numerics
from ascend_run.plugin_api.testing.parity import (
    GRADIENT_TOLERANCE,
    TRAINED_STEPS,
    TRAINED_TOLERANCE,
    compare,
)
from ascend_run.plugin_api.testing.runtime import Trial

from .check import DoesNotApply
from .places import Place, places, refusals
from .subject import Subject

_EXACT = 0.0


def at_parity(subject: Subject) -> Iterator[str]:
    """Forward, every gradient and trained steps keep to the declared numerics, on one rank and in
    a layout, where the plugin is at work."""
    if not places(subject):
        yield not_allowed(subject)
        return
    found = tried(subject)
    for place in found:
        for steps, tolerance in ((0, GRADIENT_TOLERANCE), (TRAINED_STEPS, TRAINED_TOLERANCE)):
            what = f"{place}, after {steps} steps" if steps else f"{place}, gradients"
            for problem in _off(subject, place, steps, tolerance):
                yield f"{what}, {problem}"


def idle(subject: Subject) -> Iterator[str]:
    """Where its ``idle`` condition holds, a run with it is the run without it, to the bit and to
    the operation."""
    condition = subject.manifest.idle
    if condition is None:
        raise DoesNotApply("its manifest names no condition under which it is idle")
    place = next((place for place in places(subject) if place.idle), None)
    if place is None:
        raise DoesNotApply(f"no trial in which {condition} holds is allowed")
    run = subject.means.run
    with_it = run(place.chosen, place.world_size)
    without = run(place.without, place.world_size)
    where = f"{place}, where {condition} and so it should be idle"
    for problem in compare(with_it, without, _EXACT):
        yield f"{where}: {problem}"
    for rank, (one, other) in enumerate(zip(with_it, without, strict=True)):
        for what, mine, plain in (
            ("operations", one.operations, other.operations),
            ("messages", one.collectives, other.collectives),
        ):
            for name in sorted({*mine, *plain}):
                if mine.get(name, 0) != plain.get(name, 0):
                    yield (
                        f"{where}: rank {rank} has {mine.get(name, 0)} {what} '{name}', and "
                        f"{plain.get(name, 0)} without it"
                    )


def tried(subject: Subject) -> list[Place]:
    """One rank and one layout: those where it is at work, where there are any; and a model with
    experts, where it has hooks for those.

    Raises:
        DoesNotApply: It is a platform whose device is not here, or it refuses every trial.
    """
    found = places(subject)
    if not found:
        raise DoesNotApply("every trial of the kit is refused, see KIT-PARITY")
    require_device(subject)
    active = [place for place in found if not place.idle] or found
    alone = [place for place in active if place.world_size == 1][:1]
    spread = [place for place in active if place.world_size > 1][:1]
    chosen = [*alone, *spread]
    if _has_hooks_for_experts(subject) and not any(place.model == "moe" for place in chosen):
        chosen += [place for place in active if place.model == "moe"][:1]
    return chosen


def _has_hooks_for_experts(subject: Subject) -> bool:
    points = hook_points()
    return any(points[hook].point is Point.MOE for hook in subject.facts.hooks & points.keys())


def not_allowed(subject: Subject) -> str:
    """What to do about a plugin that refuses every trial."""
    first = "; ".join(refusals(subject)[:2])
    return f"every trial of the kit is refused; give what it needs, --ascend-set KEY=VALUE: {first}"


def require_device(subject: Subject) -> None:
    """See that a platform's device is there.

    Raises:
        DoesNotApply: It is not, with what the platform says of it.
    """
    if subject.facts.kind != "platform":
        return
    (missing,) = subject.means.job(device_problem, 1, subject.name)
    if missing:
        raise DoesNotApply(f"its device is not here: {missing}")


def _off(subject: Subject, place: Place, steps: int, tolerance: float) -> Iterator[str]:
    """What lies further off than declared."""
    numerics, run = subject.manifest.numerics, subject.means.run
    outcomes = run(_stepping(place.chosen, steps), place.world_size)
    alone = place.on_one_rank
    chosen_by_kind = place.without == place.chosen
    if numerics is Numerics.MODEL or chosen_by_kind:
        if place.world_size > 1:
            itself = run(_stepping(alone.chosen, steps), 1)
            for problem in compare(outcomes, itself, tolerance):
                yield f"against its own run on one rank: {problem}"
        return
    plain = run(_stepping(alone.without, steps), 1)
    for problem in compare(outcomes, plain, tolerance):
        yield f"against one rank without it: {problem}"
    if (
        numerics is Numerics.BITWISE
        and not subject.means.examine(place.without, place.world_size).problems
    ):
        without = run(_stepping(place.without, steps), place.world_size)
        for problem in compare(outcomes, without, _EXACT):
            yield f"against the same ranks without it, bit for bit: {problem}"


def _stepping(trial: Trial, steps: int) -> Trial:
    return attrs.evolve(trial, steps=steps, counted=False)


def device_problem(platform: str) -> str:
    """A job: why a platform's device cannot be had on this rank; empty where it can."""
    from ascend_run.plugin_api.errors import AscendRunError
    from ascend_run.plugin_api.testing.runtime import load_runtime

    plugin = load_runtime().describe(platform).plugin
    options = getattr(plugin, "config_class", None)
    instance = plugin() if options is None else plugin(options())
    try:
        device = instance.ascend_device(local_rank=0)
        device.activate()
    except AscendRunError as error:
        return str(error)
    device.deactivate()
    return ""
