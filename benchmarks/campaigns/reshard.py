"""A run that resumes in another layout has loaded what was saved, bitwise, and trains on alike.

Every memory and optimizer feature, and a run with none, in each of eleven pairs of layouts, in
which every axis is left and entered; features that have nothing to do in some of them, in more
pairs. The first run takes four steps and saves after two; the second one resumes from there in the
other layout and takes the other two. All full tensors, counters and values that it has loaded are
those of the first run after two steps, bitwise; random generators are those of a run that begins in
the second layout. After four steps losses, gradient norms, weights and optimizer states are those
of the uninterrupted run within a tolerance; but for experts in half precision, where tokens go to
other experts: there only counters, learning rates, and the names, shapes and dtypes of states, and
the figures list these cases. Of a feature that declares ``bitwise``, all of it is also compared
with the two runs without it, bitwise. What is refused is listed with the reason. There is no
dropout, since random numbers depend on the layout.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.testing.models import trial_layout
from ascend_run.types.layout import world_size

from . import features, verify_clean_newer
from .campaign import PASSED, Campaign, Outcome
from .reach import reach_of_trial
from .resharded_runs import (
    LAST,
    SAVED,
    Resharded,
    beginning,
    changes,
    departures,
    job_of,
    lost,
    resharded,
    rounds_to_other_experts,
)
from .resume import CHOICES, CONFIG, PRECISIONS, SPREAD
from .run_states import other_tensors_of_ranks
from .tiny_runs import data_folder, prepare

GROUPS: Final = ("ascend_run.plugins.memory.", "ascend_run.plugins.optimizers.")
NONE: Final = "pretrain"
"""Subject of the cases without a feature: the task of all."""
REPLICATED, SHARDED, OVERLAPPED = {}, *SPREAD
EXPERT_TP: Final = {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}
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
    ("moe", ({"pp": 2}, REPLICATED), (EXPERT_TP, SHARDED)),
    ("moe", (EXPERT_TP, OVERLAPPED), ({"pp": 2, "vpp": 2}, REPLICATED)),
)
"""Model; of both runs the layout, and whether data-parallel ranks share the optimizer's state."""
_CP_EXPERTS: Final = {"cp": 2, "ep": 2}
_IN_CHUNKS: Final = {"pp": 2, "vpp": 2}
_CP_TO_CHUNKS: Final = ("moe", (_CP_EXPERTS, SHARDED), (_IN_CHUNKS, REPLICATED))
_CHUNKS_TO_CP: Final = ("moe", (_IN_CHUNKS, REPLICATED), (_CP_EXPERTS, OVERLAPPED))
_CHUNKS_TO_TP: Final = ("moe", (_IN_CHUNKS, REPLICATED), (EXPERT_TP, SHARDED))
_TP_TO_CHUNKS: Final = ("moe", (EXPERT_TP, SHARDED), (_IN_CHUNKS, REPLICATED))
MORE_PAIRS: Final[Mapping[str, Sequence[Any]]] = {
    "moe-adaptive-recompute": (_CP_TO_CHUNKS, _CHUNKS_TO_CP),
    "moe-zero-memory": (_CP_TO_CHUNKS, _CHUNKS_TO_CP),
    "recompute-activation": (_CP_TO_CHUNKS, _CHUNKS_TO_CP, _CHUNKS_TO_TP, _TP_TO_CHUNKS),
    "recompute-comm-opt": (
        ("dense", ({"tp": 2, "cp": 2}, REPLICATED), ({"tp": 2}, REPLICATED)),
        ("dense", ({"tp": 2}, REPLICATED), ({"tp": 2, "cp": 2}, SHARDED)),
    ),
    "recompute-in-advance": (_CP_TO_CHUNKS, _CHUNKS_TO_CP, _CHUNKS_TO_TP),
    "recompute-in-bubble": (_CP_TO_CHUNKS, _CHUNKS_TO_CP, _CHUNKS_TO_TP),
}
"""Feature -> more pairs, of layouts in which it has something to do. It does nothing in some of
``PAIRS``: without experts, tensor ranks or an interleaved schedule."""
SOME_EXPERTS: Final = {"recompute-activation": {"model.moe_layer_freq": [0, 1, 0, 1]}}
"""Feature -> what the model with experts is in ``MORE_PAIRS``: it treats layers without them."""
_BASE: Final[Mapping[str, Any]] = {
    "data.seq_length": 16,
    "train.train_iters": LAST,
    "train.global_batch_size": 4,
    "train.eval_interval": 0,
    "checkpoint.save_interval": 0,
}


def subjects() -> list[str]:
    """Return the features of both groups, and the run without any."""
    found = features.catalogue()
    names = (name for name in features.features() if found[name].value.startswith(GROUPS))
    return [NONE, *names]


def cases(seed: int) -> Sequence[str]:
    """Return JSON: a feature, and what both runs have; nothing is drawn.

    Those of a pair stand together, as they share their runs without a feature.
    """
    names = [*enumerate(subjects())]
    pairs = [(at, pair, turn, name) for at, pair in enumerate(PAIRS) for turn, name in names]
    more = [
        (at, pair, turn, name)
        for turn, name in names
        for at, pair in enumerate(MORE_PAIRS.get(name, ()), start=len(PAIRS))
    ]
    return [
        json.dumps(_case(place, pair, name, precision), sort_keys=True)
        for place, pair, turn, name in (*pairs, *more)
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


def _case(place: int, pair: Any, name: str, precision: Mapping[str, Any]) -> dict[str, Any]:
    model, *sides = pair
    feature = [] if name == NONE else [name]
    if name in verify_clean_newer.BESIDE:
        feature.append(verify_clean_newer.BESIDE[name])
    choices = CHOICES.get(name, ({},))
    options = {f"plugins.{name}.{k}": v for k, v in choices[place % len(choices)].items()}
    given = {k: v for k, v in features.OPTIONS.items() if k.split(".")[1] in feature}
    config = {**CONFIG.get(name, {}), **(SOME_EXPERTS.get(name, {}) if place >= len(PAIRS) else {})}
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
                data_folder(), **job_of(asked, side), world_size=world_size(asked[side]["layout"])
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


def _problems(asked: Mapping[str, Any]) -> Iterator[str]:
    plugin = asked["plugin"]
    found = resharded(asked)
    yield from lost(found)
    yield from departures(found, plugin, **_rounding(asked))
    if is_bitwise(plugin):
        found_without = changes(found, _without(asked))
        yield from (f"against the runs without it: {problem}" for problem in found_without)
    else:
        generators = other_tensors_of_ranks(found.resumed[SAVED], beginning(asked))
        yield from (f"loaded, against a run that begins: {problem}" for problem in generators)


def _rounding(asked: Mapping[str, Any]) -> Mapping[str, bool]:
    half = asked["values"]["train.precision"] != "fp32"
    return {"half": half, "experts": asked["model"] == "moe"}


def _without(asked: Mapping[str, Any]) -> Resharded:
    """Return the same runs without the feature."""
    values = {k: v for k, v in asked["values"].items() if not k.startswith("plugins.")}
    return _plain(json.dumps({**asked, "plugin": NONE, "enable": [], "values": values}))


@functools.lru_cache(maxsize=len(PRECISIONS))
def _plain(asked: str) -> Resharded:
    return resharded(json.loads(asked))


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    """Count what was compared, of which features in which precisions, and what was refused."""
    compared: dict[str, Counter[str]] = {}
    refused: Counter[str] = Counter()
    only_loaded: Counter[str] = Counter()
    for case, outcome in outcomes.items():
        asked = json.loads(case)
        if "refused" in outcome:
            refused[f"{asked['plugin']}: {outcome['refused']}"] += 1
        elif "compared" in outcome:
            compared.setdefault(asked["plugin"], Counter())[asked["values"]["train.precision"]] += 1
            if rounds_to_other_experts(**_rounding(asked)) and not is_bitwise(asked["plugin"]):
                only_loaded[asked["plugin"]] += 1
    return {
        "compared": sum("compared" in outcome for outcome in outcomes.values()),
        "values only as loaded, for experts in half precision": dict(only_loaded),
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
