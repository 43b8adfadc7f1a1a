"""``verify`` on combinations without a bug: it must raise no alarm.

Two hundred seeded draws of features, a layout of 1, 2 or 4 ranks, a model and settings that go
together. What a draw cannot have, it is not given: experts' parallelism only with experts, a cut
sequence only with a feature that exchanges it.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from .campaign import PASSED, Campaign, Outcome
from .pool_of_ranks import pool
from .reach import reach_of_trial

if TYPE_CHECKING:
    from ascend_run.tools.verify.questions import Question
    from ascend_run.tools.verify.verifier import Verifier

COUNT: Final = 200
_EXCHANGES: Final = ("ulysses", "ring-attention")
_FEATURES: Final = (
    "compile",
    "deterministic",
    "gloo-offload",
    "gmm",
    "lora",
    "noop-layers",
    "swap-attention",
    "tensorboard",
)
_VERIFIER: Final = "ascend_run/tools/verify/verifier.py"
OLDER: Final = (*_EXCHANGES, *_FEATURES)
"""All that are drawn."""
_ONE: Final = {"dp": 1}
LAYOUTS: Final[Sequence[Mapping[str, int]]] = (
    _ONE,
    {"dp": 2},
    {"tp": 2},
    {"tp": 2, "sp": 1},
    {"pp": 2},
    {"cp": 2},
    {"dp": 4},
    {"tp": 2, "sp": 1, "dp": 2},
    {"tp": 2, "sp": 1, "cp": 2},
    {"tp": 2, "sp": 1, "pp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "cp": 2},
    {"cp": 2, "dp": 2},
    {"cp": 4},
)
EXPERT_AXES: Final[Sequence[Mapping[str, int]]] = ({}, {"ep": 2}, {"expt_tp": 2})
_OPTIONS: Final = {
    "plugins.swap-attention.min_bytes": 1,
    "plugins.noop-layers.layers": [1],
    "plugins.lora.export": False,
}
SETTINGS: Final[Sequence[Mapping[str, Any]]] = (
    {"model.share_embeddings_and_output_weights": True},
    {"model.qk_layernorm": True},
    {"model.recompute_granularity": "full", "model.recompute_method": "uniform",
     "model.recompute_num_layers": 1},
    {"ddp.use_distributed_optimizer": True},
    {"ddp.use_distributed_optimizer": True, "ddp.overlap_grad_reduce": True,
     "ddp.overlap_param_gather": True},
    {"optimizer.clip_grad": 0.1},
    {"train.micro_batch_size": 2, "train.global_batch_size": 8},
)  # fmt: skip
DROPOUT: Final[Sequence[Mapping[str, Any]]] = (
    {},
    {},
    {"model.hidden_dropout": 0.1},
    {"model.attention_dropout": 0.1},
    {"model.hidden_dropout": 0.2, "model.attention_dropout": 0.1},
)
"""Compared where a reference draws the same numbers; elsewhere ``verify`` goes without."""


def cases(seed: int) -> Sequence[str]:
    """JSON: what is asked of ``verify``."""
    draws = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < COUNT:
        found[json.dumps(_draw(draws), sort_keys=True)] = None
    return tuple(found)


def _draw(draws: random.Random) -> dict[str, Any]:
    model = draws.choice(("dense", "moe"))
    layout = dict(draws.choice(LAYOUTS))
    features = draws.sample(_FEATURES, draws.choice((0, 1, 1, 2, 3)))
    settings = dict(draws.choice(({}, {}, *SETTINGS)))
    if layout.get("cp", 1) > 1:
        features.append(draws.choice(_EXCHANGES))
    if model == "moe":
        ranks = layout.get("tp", 1) * layout.get("cp", 1) * layout.get("dp", 1)
        if layout.get("tp", 1) > 1:
            layout["sp"] = 1  # experts under tensor parallelism need it
        if ranks > 1:
            layout |= draws.choice(EXPERT_AXES)
    else:
        features = [name for name in features if name != "gmm"]
    if settings.get("model.recompute_granularity") == "full":  # keeps nothing to be swapped
        features = [name for name in features if name != "swap-attention"]
    if "noop-layers" in features:
        stages = layout.get("pp", 1) * layout.get("vpp", 1)
        settings["model.num_layers"] = 4 if stages > 1 else 3
    settings |= draws.choice(DROPOUT)
    return {"enable": sorted(features), "layout": layout, "model": model, "config": settings}


@functools.cache
def _verifier() -> Verifier:
    """One for all cases: it keeps the runs that it compares with."""
    from ascend_run.tools.verify.ranks import PoolRanks
    from ascend_run.tools.verify.verifier import Verifier

    return Verifier(PoolRanks(pool()))


def question(asked: Mapping[str, Any]) -> Question:
    """What a case asks."""
    from ascend_run.tools.verify.questions import Question

    return Question(
        enable=tuple(asked["enable"]),
        layout=asked["layout"],
        model=asked["model"],
        config={**asked["config"], **_OPTIONS},
    )


def run(case: str) -> Outcome:
    verdict = _verifier()(question(json.loads(case)))
    alarms = [
        f"{check.name} against {check.against}" for check in verdict.checks if not check.passed
    ]
    return {
        "verdict": "false alarm" if alarms or verdict.fault is not None else PASSED,
        "says": verdict.sentence(),
        "alarms": alarms,
        "not exercised": [e.subject for e in verdict.exercises if not e.exercised],
        "compared": list(verdict.references),
        "with dropout": any(check.name.endswith(", dropout") for check in verdict.checks),
    }


def reach(case: str) -> str:
    """Return the hash of all that a combination and ``verify`` can reach."""
    asked = json.loads(case)
    return reach_of_trial(asked["enable"], asked["model"], files=[_VERIFIER])


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    return {
        "combinations": len(outcomes),
        "false alarms": sum(o["verdict"] == "false alarm" for o in outcomes.values()),
        "compared with dropout": sum(bool(o.get("with dropout")) for o in outcomes.values()),
        "bitwise": sum(o.get("says") == "bitwise" for o in outcomes.values()),
    }


CAMPAIGN = Campaign(name="verify-clean", seed=20261122, cases=cases, run=run, figures=figures)
