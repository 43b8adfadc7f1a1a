"""A run that resumes in another layout has what was saved, to the bit, and goes on as without it.

Every memory and optimizer feature, and a run with none, in each of thirteen pairs of layouts, in
which every axis is left and entered. The first run takes four steps and saves after two; the second
one resumes from there in the other layout and takes the other two. All full tensors, counters and
values that it has loaded are those of the first run after two steps, bitwise; random generators are
those of a run that begins in the second layout. After four steps losses, gradient norms, weights
and optimizer states are those of the uninterrupted run within a tolerance. Of a feature that
declares ``bitwise``, all of it is also compared with the two runs without it, bitwise. What is
refused is listed with the reason. There is no dropout, since random numbers depend on the layout.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import attrs

from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.testing.models import trial_layout
from ascend_run.testing.parity import TRAINED_TOLERANCE
from ascend_run.testing.tensors import relative_error
from ascend_run.types.layout import world_size

from . import features, verify_clean_newer
from .campaign import PASSED, Campaign, Outcome
from .pool_of_ranks import pool
from .reach import reach_of_trial
from .resume import CHOICES, CONFIG, PRECISIONS, SECONDS, SPREAD
from .run_states import (
    RunState,
    changed_bits,
    changed_values,
    other_tensors_of_ranks,
    states_of_run,
)
from .tiny_runs import data_folder, prepare
from .watched_runs import readings, resumed_at

SAVED: Final = 2
LAST: Final = 4
GROUPS: Final = ("ascend_run.plugins.memory.", "ascend_run.plugins.optimizers.")
NONE: Final = "pretrain"
"""Subject of the cases without a feature: the task of all."""
REPLICATED, SHARDED, OVERLAPPED = {}, *SPREAD
PAIRS: Final = (
    ("dense", ({"dp": 2}, SHARDED), ({}, REPLICATED)),
    ("dense", ({"dp": 2}, OVERLAPPED), ({"dp": 4}, SHARDED)),
    ("dense", ({"cp": 2}, REPLICATED), ({"dp": 2}, OVERLAPPED)),
    ("dense", ({}, REPLICATED), ({"cp": 2}, SHARDED)),
    ("dense", ({"tp": 2}, REPLICATED), ({"pp": 2}, REPLICATED)),
    ("dense", ({"pp": 2, "vpp": 2}, REPLICATED), ({"tp": 2}, REPLICATED)),
    ("dense", ({"pp": 2, "vpp": 2}, REPLICATED), ({"pp": 2, "vpp": 2, "dp": 2}, SHARDED)),
    ("moe", ({"dp": 2, "ep": 2}, SHARDED), ({"dp": 2}, OVERLAPPED)),
    ("moe", ({"dp": 2, "ep": 2}, SHARDED), ({"pp": 2}, REPLICATED)),
    ("moe", ({"pp": 2}, REPLICATED), ({"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}, SHARDED)),
    ("moe", ({"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}, OVERLAPPED), ({"pp": 2, "vpp": 2}, {})),
)
"""Model, and of both runs the layout and whether data-parallel ranks share the optimizer's state."""
HALF_TOLERANCE: Final = 2.0**-5
_BASE: Final[Mapping[str, Any]] = {
    "data.seq_length": 16,
    "train.train_iters": LAST,
    "train.global_batch_size": 4,
    "train.eval_interval": 0,
    "checkpoint.save_interval": 0,
}
_NUMBERS: Final = ("loss", "grad_norm", "aux_loss", "expert_load", "expert_load_by_layer")
"""Readings that depend on the order of reduction."""
_HASHES: Final = ("fingerprint", "parameters")
"""Readings that depend on every bit."""


def subjects() -> list[str]:
    """Return the features of both groups, and the run without any."""
    found = features.catalogue()
    names = (name for name in features.features() if found[name].value.startswith(GROUPS))
    return [NONE, *names]


def cases(seed: int) -> Sequence[str]:
    """Return JSON: a feature, and what both runs have; nothing is drawn.

    Those of a pair stand together, as they share their runs without a feature.
    """
    return [
        json.dumps(_case(place, turn, name, precision), sort_keys=True)
        for place in range(len(PAIRS))
        for turn, name in enumerate(subjects())
        for precision in _precisions(place, turn, name)
    ]


def _precisions(place: int, turn: int, name: str) -> Sequence[Mapping[str, Any]]:
    """Return one, in turn, of a feature that is compared bitwise; of others always float32, in
    which the tolerance is close, and in every second pair another."""
    if needed := verify_clean_newer.NEEDS.get(name, {}).get("train.precision"):
        return [{"train.precision": needed}]
    if is_bitwise(name):
        return [PRECISIONS[(place + turn) % len(PRECISIONS)]]
    full, *half = PRECISIONS
    return [full, *half[(place + turn) % 4 : (place + turn) % 4 + 1]]


def is_bitwise(name: str) -> bool:
    """Return whether a subject declares to change no bit of a run without it."""
    return name != NONE and features.numerics_of(name) is Numerics.BITWISE


def _case(place: int, turn: int, name: str, precision: Mapping[str, Any]) -> dict[str, Any]:
    model, *sides = PAIRS[place]
    feature = [] if name == NONE else [name]
    if name in verify_clean_newer.BESIDE:
        feature.append(verify_clean_newer.BESIDE[name])
    choices = CHOICES.get(name, ({},))
    options = {f"plugins.{name}.{k}": v for k, v in choices[place % len(choices)].items()}
    given = {k: v for k, v in features.OPTIONS.items() if k.split(".")[1] in feature}
    config = CONFIG.get(name, {})
    layers = 4 if any("pp" in layout for layout, _ in sides) else 2
    made = [
        {
            "layout": layout,
            "enable": [features.EXCHANGE] if features.needs_exchange(name, layout) else [],
            "values": {**trial_layout(layout), **spread, **config},
        }
        for layout, spread in sides
    ]
    return {
        "plugin": name,
        "model": model,
        "enable": feature,
        "values": {**_BASE, "model.num_layers": layers, **precision, **given, **options},
        "begun": made[0],
        "resumed": made[1],
    }


def run(case: str) -> Outcome:
    """Plan both runs; then take them and compare."""
    asked = json.loads(case)
    refused, idle = [], []
    for side in ("begun", "resumed"):
        try:
            prepared = prepare(
                data_folder(), **_job(asked, side), world_size=world_size(asked[side]["layout"])
            )
        except AscendRunError as error:
            refused += error.problems or (error.headline,)
        else:
            idle += [side] if asked["plugin"] in prepared.plan.idle else []
    if refused:
        return {"verdict": PASSED, "refused": "; ".join(dict.fromkeys(refused))}
    if len(idle) == 2:
        return {"verdict": PASSED, "idle": True}
    problems = [*_problems(asked)]
    if problems:
        return {"verdict": "differs", "why": "; ".join(problems[:3]), "all": problems}
    return {"verdict": PASSED, "compared": True, "idle in": idle}


def _job(
    asked: Mapping[str, Any], side: str, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return arguments of ``tiny_runs.prepare``."""
    own = asked[side]
    return {
        "enable": [*asked["enable"], *own["enable"]],
        "model": asked["model"],
        "values": {**asked["values"], **own["values"], **(more or {})},
    }


@attrs.frozen
class Resharded:
    """A run, and the one that resumed from its checkpoint in another layout."""

    begun: Mapping[int, RunState]
    """Completed steps -> state."""
    resumed: Mapping[int, RunState]
    steps: Sequence[Mapping[str, Any]]
    """Readings of the first run after the checkpoint."""
    resumed_steps: Sequence[Mapping[str, Any]]
    anew: Sequence[str]
    """Entries of the checkpoint that the log says are not restored."""


def resharded(asked: Mapping[str, Any]) -> Resharded:
    """Take both runs of a case."""
    folder = Path(mkdtemp(dir=data_folder()))
    loading = {
        "checkpoint.load": str(folder / "begun/checkpoints"),
        "checkpoint.step": SAVED,
    }
    try:
        begun = _states(asked, "begun", folder / "begun", {"checkpoint.save_interval": SAVED})
        resumed = _states(asked, "resumed", folder / "resumed", loading)
        if resumed_at(folder / "resumed") != [SAVED]:
            raise AssertionError(f"it resumed at {resumed_at(folder / 'resumed')}, not at {SAVED}")
        first, second = (readings(folder / name) for name in ("begun", "resumed"))
        anew = _begun_anew(folder / "resumed")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Resharded(begun, resumed, [r for r in first if r["step"] > SAVED], second, anew)


def _states(
    asked: Mapping[str, Any], side: str, folder: Path, more: Mapping[str, Any]
) -> dict[int, RunState]:
    """Take one run of a case in a folder; return completed steps -> state."""
    job = _job(asked, side, {**more, "run.output_dir": str(folder)})
    size = world_size(asked[side]["layout"])
    ranks = pool().run(states_of_run, size, data_folder(), job, timeout=SECONDS)
    return {step: RunState.of([rank[step] for rank in ranks]) for step in ranks[0]}


def _begun_anew(run: Path) -> list[str]:
    lines = map(json.loads, (run / "log.jsonl").read_text(encoding="utf-8").splitlines())
    found = [line for line in lines if line["event"] == "checkpoint.other_layout"]
    return [name for line in found for name in line["begun_anew"]]


def _problems(asked: Mapping[str, Any]) -> Iterator[str]:
    found = resharded(asked)
    yield from _restored(found)
    yield from _continued(found, asked)
    if not is_bitwise(asked["plugin"]):
        for problem in other_tensors_of_ranks(found.resumed[SAVED], _beginning(asked)):
            yield f"loaded, against a run that begins in this layout: {problem}"
    else:
        plain = _without(asked)
        for step in (SAVED, LAST):
            for side in ("begun", "resumed"):
                states = [getattr(one, side)[step] for one in (found, plain)]
                for problem in (*changed_bits(*states), *other_tensors_of_ranks(*states)):
                    yield f"{side}, step {step}, against the run without it: {problem}"
        if found.resumed_steps != plain.resumed_steps:
            yield "the steps that follow have other readings than without it"


def _beginning(asked: Mapping[str, Any]) -> RunState:
    """Return the state of a run that begins in the second layout."""
    folder = Path(mkdtemp(dir=data_folder()))
    try:
        return _states(asked, "resumed", folder, {"train.train_iters": 1})[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _without(asked: Mapping[str, Any]) -> Resharded:
    """Return the same without the feature."""
    values = {k: v for k, v in asked["values"].items() if not k.startswith("plugins.")}
    return _plain(json.dumps({**asked, "plugin": NONE, "enable": [], "values": values}))


@functools.lru_cache(maxsize=len(PRECISIONS))
def _plain(asked: str) -> Resharded:
    return resharded(json.loads(asked))


def _restored(found: Resharded) -> Iterator[str]:
    saved, loaded = found.begun[SAVED], found.resumed[SAVED]
    yield from (f"saved: {problem}" for problem in saved.problems)
    yield from (f"loaded: {problem}" for problem in loaded.problems)
    yield from (f"loaded: {problem}" for problem in changed_bits(loaded, saved))
    if [*found.anew] != ["rng"]:
        yield f"the log says that {[*found.anew]} are not restored, not the random generators alone"


def _continued(found: Resharded, asked: Mapping[str, Any]) -> Iterator[str]:
    tolerance = _tolerance(asked)
    ours, wanted = found.resumed[LAST], found.begun[LAST]
    yield from (f"step {LAST}: {problem}" for problem in ours.problems)
    yield from (f"step {LAST}: {problem}" for problem in changed_values(ours, wanted))
    for key in sorted({*ours.tensors, *wanted.tensors}):
        error = relative_error(ours.tensors[key], wanted.tensors[key])
        if error > tolerance:
            yield f"step {LAST}: {key} has relative error {error:.2e}, tolerance {tolerance:.0e}"
    for one, other in zip(found.resumed_steps, found.steps, strict=True):
        for name in sorted({*one, *other} - {*_HASHES}):
            if not _near(one.get(name), other.get(name), tolerance if name in _NUMBERS else 0.0):
                yield f"step {one['step']}: '{name}' is {one.get(name)}, not {other.get(name)}"
    if len({line["loss"] for line in found.steps}) < LAST - SAVED:
        yield "the loss stands still, so the steps show nothing"


def _tolerance(asked: Mapping[str, Any]) -> float:
    return TRAINED_TOLERANCE if asked["values"]["train.precision"] == "fp32" else HALF_TOLERANCE


def _near(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(_near(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance * abs(other)
    return bool(one == other)


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    """Count what was compared, of which features in which precisions, and what was refused."""
    compared: dict[str, Counter[str]] = {}
    refused: Counter[str] = Counter()
    for case, outcome in outcomes.items():
        asked = json.loads(case)
        if "refused" in outcome:
            refused[f"{asked['plugin']}: {outcome['refused']}"] += 1
        elif "compared" in outcome:
            compared.setdefault(asked["plugin"], Counter())[asked["values"]["train.precision"]] += 1
    return {
        "compared": sum("compared" in outcome for outcome in outcomes.values()),
        "of an idle feature": sum("idle" in outcome for outcome in outcomes.values()),
        "cases of each feature": {name: dict(sorted(n.items())) for name, n in compared.items()},
        "refused": dict(sorted(refused.items())),
    }


def reach(case: str) -> str:
    """Return the hash of all that a case can reach."""
    asked = json.loads(case)
    names = (*asked["enable"], *asked["begun"]["enable"], *asked["resumed"]["enable"])
    return reach_of_trial(names, asked["model"])  # a case has its options in it


CAMPAIGN = Campaign(name="reshard", seed=0, cases=cases, run=run, figures=figures, reach=reach)
