"""Check a plugin's effect on the results of a run against its manifest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import attrs

from ascend_run.plugin_api.hook_kinds import Point
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.testing.models import batch_of_steps
from ascend_run.testing.parity import GRADIENT_TOLERANCE, TRAINED_STEPS, TRAINED_TOLERANCE, compare
from ascend_run.testing.runtime import Trial
from ascend_run.types.declarations import Numerics

from .check import DoesNotApply
from .declaration import ATTENTION_HOOKS
from .scenarios import Scenario, refusals, scenarios
from .subject import Subject

_EXACT = 0.0


def at_parity(subject: Subject) -> Iterator[str]:
    """Check losses, gradients and trained weights against the declared numerics, on one rank and in
    a layout where the plugin is active."""
    if not scenarios(subject):
        yield not_allowed(subject)
        return
    found = tried(subject)
    for scenario in found:
        for steps, tolerance in ((0, GRADIENT_TOLERANCE), (TRAINED_STEPS, TRAINED_TOLERANCE)):
            what = f"{scenario}, after {steps} steps" if steps else f"{scenario}, gradients"
            for problem in _off(subject, scenario, steps, tolerance):
                yield f"{what}, {problem}"
        yield from _off_formula(subject, scenario)


def idle(subject: Subject) -> Iterator[str]:
    """Check that under its ``idle`` condition a run with it is bitwise equal to the run without it
    and executes the same operations."""
    condition = subject.manifest.idle
    if condition is None:
        raise DoesNotApply("its manifest names no condition under which it is idle")
    scenario = next((scenario for scenario in scenarios(subject) if scenario.idle), None)
    if scenario is None:
        raise DoesNotApply(f"no trial in which {condition} holds is allowed")
    run = subject.means.run
    with_it = run(scenario.chosen, scenario.world_size)
    without = run(scenario.without, scenario.world_size)
    where = f"{scenario}, where {condition} and so it should be idle"
    for problem in compare(with_it, without, _EXACT):
        yield f"{where}: {problem}"
    for rank, (one, other) in enumerate(zip(with_it, without, strict=True)):
        for what, mine, plain in (
            ("operations", one.operations, other.operations),
            ("collectives", one.collectives, other.collectives),
        ):
            for name in sorted({*mine, *plain}):
                if mine.get(name, 0) != plain.get(name, 0):
                    yield (
                        f"{where}: rank {rank} has {mine.get(name, 0)} {what} '{name}', but "
                        f"{plain.get(name, 0)} without it"
                    )


def tried(subject: Subject) -> list[Scenario]:
    """Return the scenarios to try: one rank and one layout, preferably ones where it is active; and
    a model with experts, if it has hooks for them.

    Raises:
        DoesNotApply: It is a platform whose device is not available, or it rejects every trial.
    """
    found = scenarios(subject)
    if not found:
        raise DoesNotApply("every trial of the kit is rejected, see KIT-PARITY")
    require_device(subject)
    active = [scenario for scenario in found if not scenario.idle] or found
    alone = [scenario for scenario in active if scenario.world_size == 1][:1]
    spread = [scenario for scenario in active if scenario.world_size > 1][:1]
    chosen = [*alone, *spread]
    if _has_hooks_for_experts(subject) and not any(scenario.model == "moe" for scenario in chosen):
        chosen += [scenario for scenario in active if scenario.model == "moe"][:1]
    return chosen


def _has_hooks_for_experts(subject: Subject) -> bool:
    points = hook_points()
    return any(points[hook].point is Point.MOE for hook in subject.facts.hooks & points.keys())


def not_allowed(subject: Subject) -> str:
    """Return the message for a plugin that rejects every trial."""
    first = "; ".join(refusals(subject)[:2])
    return f"every trial of the kit is rejected; set what it needs, --ascend-set KEY=VALUE: {first}"


def require_device(subject: Subject) -> None:
    """Check that a platform's device is available.

    Raises:
        DoesNotApply: It is not; has the platform's error message.
    """
    if subject.facts.kind != "platform":
        return
    if missing := subject.once("device problem", partial(_device_problem, subject)):
        raise DoesNotApply(f"its device is not available: {missing}")


def _device_problem(subject: Subject) -> str:
    (missing,) = subject.means.job(device_problem, 1, subject.name)
    # What the device has changed in this process would no longer differ in a later run.
    subject.means.pool_of_ranks().close()
    return str(missing)


def _off(subject: Subject, scenario: Scenario, steps: int, tolerance: float) -> Iterator[str]:
    """A message for each result whose error exceeds the declared numerics."""
    numerics, run = subject.manifest.numerics, subject.means.run
    outcomes = run(stepping(subject, scenario, steps, scenario.chosen), scenario.world_size)
    alone = scenario.on_one_rank
    chosen_by_kind = scenario.without == scenario.chosen
    if numerics is Numerics.MODEL or chosen_by_kind:
        if scenario.world_size > 1:
            itself = run(stepping(subject, alone, steps, alone.chosen), 1)
            for problem in compare(outcomes, itself, tolerance):
                yield f"against its own run on one rank: {problem}"
        elif subject.facts.kind == "task" and not steps:
            larger = run(_larger_micro_batches(stepping(subject, alone, 0, alone.without)), 1)
            for problem in compare(outcomes, larger, tolerance):
                yield f"against a run with larger micro-batches: {problem}"
        return
    plain = run(stepping(subject, scenario, steps, alone.without), 1)
    for problem in compare(outcomes, plain, tolerance):
        yield f"against one rank without it: {problem}"
    if (
        numerics is Numerics.BITWISE
        and not subject.means.examine(scenario.without, scenario.world_size).problems
    ):
        without = run(stepping(subject, scenario, steps, scenario.without), scenario.world_size)
        for problem in compare(outcomes, without, _EXACT):
            yield f"against the same ranks without it, bitwise: {problem}"


def _off_formula(subject: Subject, scenario: Scenario) -> Iterator[str]:
    """A message for each declared feature that its attention kernel does not compute."""
    trial = stepping(subject, scenario, 0, scenario.chosen)
    errors = subject.means.run(trial, scenario.world_size)[0].attention_errors
    for what, error in errors.items():
        if not error <= GRADIENT_TOLERANCE:
            yield (
                f"{scenario}, its attention with {what} has max error {error:.2e} relative to the "
                "largest value of the formula; declare in AttentionFeatures only what it computes"
            )


def _larger_micro_batches(trial: Trial) -> Trial:
    """The loss is the sum over the global batch divided by its count, however it is split."""
    key = "train.micro_batch_size"
    config = {**trial.config, key: 2 * trial.config[key]}
    return attrs.evolve(trial, config=config, by_differences=())


def stepping(subject: Subject, scenario: Scenario, steps: int, trial: Trial) -> Trial:
    """Return a trial of a scenario, with or without the plugin, that takes steps; without steps,
    one that compares with differences what the plugin can have made wrong."""
    if steps:
        batch = batch_of_steps(trial.config, scenario.layout)
        return attrs.evolve(trial, steps=steps, counted=False, config={**trial.config, **batch})
    parts = parts_of(subject, scenario.world_size) if trial == scenario.chosen else ()
    return attrs.evolve(trial, steps=0, counted=False, by_differences=parts, probe_weights=False)


def parts_of(subject: Subject, world_size: int) -> tuple[str, ...]:
    """Return what to compare with differences in a trial with the plugin."""
    hooks, numerics = subject.facts.hooks, subject.manifest.numerics
    if world_size > 1:
        return ("attention",) if "ascend_attention" in hooks else ()
    kind = subject.facts.kind
    changes_model = kind == "feature" and numerics is Numerics.MODEL
    attention = ("attention",) if ATTENTION_HOOKS & hooks else ()
    return (
        "functions",
        *attention,
        *(("formula",) if attention and numerics is not Numerics.MODEL else ()),
        *(("parameters",) if changes_model or kind in ("task", "model family") else ()),
    )


def device_problem(platform: str) -> str:
    """Return why a platform's device is not available on this rank; empty if it is. A job of the
    pool."""
    from ascend_run.plugin_api.errors import AscendRunError
    from ascend_run.testing.runtime import load_runtime

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
