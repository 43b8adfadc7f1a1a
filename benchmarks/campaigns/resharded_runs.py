"""A run, and one that resumes from its checkpoint in another layout: what the second one has lost,
and where they part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import attrs

from ascend_run.testing.parity import TRAINED_TOLERANCE
from ascend_run.testing.tensors import differences
from ascend_run.types.layout import world_size

from .pool_of_ranks import pool
from .run_states import (
    RunState,
    changed_bits,
    changed_values,
    other_tensors_of_ranks,
    states_of_run,
)
from .tiny_runs import data_folder
from .watched_runs import readings, resumed_at

SAVED: Final = 2
LAST: Final = 4
SECONDS: Final = 200.0
"""Of one run."""
HALF_TOLERANCE: Final = 2.0**-7
"""Of weights, losses and norms in half precision: eps of bfloat16."""
HALF_MOMENTS: Final = 2.0**-4
"""Of moments in half precision: gradients pass through all layers in it."""
ROUNDED_MOMENTS: Final = {
    "low-precision-optimizer": 2.0**-4,  # values near the largest of a block are 1.4e-2 apart
    "o2-bf16-optimizer": 2.0**-6,  # and those of bfloat16 up to its eps, 2**-7
}
"""Feature -> tolerance of moments that it rounds, to another neighbour in each of the two steps."""
_MOMENTS: Final = ("optimizer/exp_avg/", "optimizer/exp_avg_sq/", "optimizer/momentum_buffer/")
_NUMBERS: Final = ("loss", "grad_norm", "aux_loss", "expert_load", "expert_load_by_layer")
"""Readings that depend on the order of reduction."""
_HASHES: Final = ("fingerprint", "parameters")
"""Readings that depend on every bit."""


@attrs.frozen
class Resharded:
    """What both runs held."""

    begun: Mapping[int, RunState]
    """Completed steps -> state."""
    resumed: Mapping[int, RunState]
    steps: Sequence[Mapping[str, Any]]
    """Readings of the first run after the checkpoint."""
    resumed_steps: Sequence[Mapping[str, Any]]
    resumed_at: Sequence[int]
    reinitialized: Sequence[Sequence[str]]
    """Entries of the checkpoint that are not restored, as the log of each rank says."""


def job_of(
    asked: Mapping[str, Any], side: str, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return arguments of ``tiny_runs.prepare`` for one of both runs of a case."""
    own = asked[side]
    return {
        "enable": [*asked["enable"], *own["enable"]],
        "model": asked["model"],
        "values": {**asked["values"], **own["values"], **(more or {})},
    }


def resharded(asked: Mapping[str, Any]) -> Resharded:
    """Take both runs of a case."""
    folder = Path(mkdtemp(dir=data_folder()))
    loaded = {"checkpoint.load": str(folder / "begun/checkpoints"), "checkpoint.step": SAVED}
    try:
        begun = _states(asked, "begun", folder / "begun", {"checkpoint.save_interval": SAVED})
        resumed = _states(asked, "resumed", folder / "resumed", loaded)
        return Resharded(
            begun,
            resumed,
            [line for line in readings(folder / "begun") if line["step"] > SAVED],
            readings(folder / "resumed"),
            resumed_at(folder / "resumed"),
            _reinitialized(folder / "resumed"),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def beginning(asked: Mapping[str, Any]) -> RunState:
    """Return the state of a run that begins in the second layout."""
    folder = Path(mkdtemp(dir=data_folder()))
    try:
        return _states(asked, "resumed", folder, {"train.train_iters": 1})[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _states(
    asked: Mapping[str, Any], side: str, folder: Path, more: Mapping[str, Any]
) -> dict[int, RunState]:
    """Take one run in a folder; return completed steps -> state."""
    job = job_of(asked, side, {**more, "run.output_dir": str(folder)})
    size = world_size(asked[side]["layout"])
    ranks = pool().run(states_of_run, size, data_folder(), job, timeout=SECONDS)
    return {step: RunState.of([rank[step] for rank in ranks]) for step in ranks[0]}


def _reinitialized(run: Path) -> list[list[str]]:
    lines = map(json.loads, (run / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["begun_anew"] for line in lines if line["event"] == "checkpoint.other_layout"]


def lost(found: Resharded) -> Iterator[str]:
    """Yield a message for everything that was loaded otherwise than it was saved, bitwise."""
    saved, loaded = found.begun[SAVED], found.resumed[SAVED]
    yield from (f"saved: {problem}" for problem in saved.problems)
    yield from (f"loaded: {problem}" for problem in loaded.problems)
    yield from (f"loaded: {problem}" for problem in changed_bits(loaded, saved))
    if found.resumed_at != [SAVED]:
        yield f"the run resumed at {found.resumed_at}, not at {SAVED} once"
    names = found.reinitialized
    if not names or any(of_rank != ["rng"] for of_rank in names):
        yield f"the log says that {names} are not restored, not the random generators alone"


def departures(found: Resharded, plugin: str, *, half: bool, experts: bool) -> Iterator[str]:
    """Yield a message for everything that is not as in the uninterrupted run after more steps.

    Args:
        half: Whether the runs are in half precision.
        experts: Whether the model has experts.
    """
    ours, wanted = found.resumed[LAST], found.begun[LAST]
    yield from (f"step {LAST}: {problem}" for problem in ours.problems)
    yield from (f"step {LAST}: {problem}" for problem in changed_values(ours, wanted))
    if len({line["loss"] for line in found.steps if "loss" in line}) < LAST - SAVED:
        yield "the loss stands still, so the steps show nothing"
    if rounds_to_other_experts(half=half, experts=experts):
        yield from (f"step {LAST}: {problem}" for problem in _other_shapes(ours, wanted))
        yield from _other_readings(found, None)
        return
    usual = HALF_TOLERANCE if half else TRAINED_TOLERANCE
    moments = max(HALF_MOMENTS if half else usual, ROUNDED_MOMENTS.get(plugin, 0.0))
    for tolerance, of_moments in ((usual, False), (moments, True)):
        pair = [
            {
                k: tensor
                for k, tensor in state.tensors.items()
                if k.startswith(_MOMENTS) is of_moments
            }
            for state in (ours, wanted)
        ]
        yield from (f"step {LAST}: {problem}" for problem in differences(*pair, tolerance))
    yield from _other_readings(found, usual)


def rounds_to_other_experts(*, half: bool, experts: bool) -> bool:
    """Return whether runs in two layouts train on as other ones: tokens go to other experts where
    their scores round to another order. What the steps leave has the same names and shapes only."""
    return half and experts


def _other_shapes(ours: RunState, wanted: RunState) -> Iterator[str]:
    one, other = (
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.tensors.items()}
        for state in (ours, wanted)
    )
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield f"{name} is {one.get(name)}, not {other.get(name)}"
    for name, tensor in ours.tensors.items():
        if not tensor.isfinite().all():
            yield f"{name} is not finite"


def _other_readings(found: Resharded, tolerance: float | None) -> Iterator[str]:
    """Yield a message for each reading that is another one.

    Args:
        tolerance: Of those that depend on the order of reduction; None: they need only be there.
    """
    for one, other in zip(found.resumed_steps, found.steps, strict=True):
        for name in sorted({*one, *other} - {*_HASHES}):
            allowed = tolerance if name in _NUMBERS else 0.0
            if allowed is None and name in one and name in other:
                continue
            if not _near(one.get(name), other.get(name), allowed or 0.0):
                yield f"step {one['step']}: '{name}' is {one.get(name)}, not {other.get(name)}"


def changes(found: Resharded, plain: Resharded) -> Iterator[str]:
    """Yield a message for everything that is not as in the same runs of the reference, bitwise."""
    of_side: Sequence[tuple[str, Callable[[Resharded], Mapping[int, RunState]]]] = (
        ("begun", lambda one: one.begun),
        ("resumed", lambda one: one.resumed),
    )
    for side, states in of_side:
        for step in (SAVED, LAST):
            pair = states(found)[step], states(plain)[step]
            for problem in (*changed_bits(*pair), *other_tensors_of_ranks(*pair)):
                yield f"{side}, step {step}: {problem}"
    if found.resumed_steps != plain.resumed_steps:
        yield "the steps after the checkpoint have other readings"


def _near(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(_near(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance * abs(other)
    return bool(one == other)
