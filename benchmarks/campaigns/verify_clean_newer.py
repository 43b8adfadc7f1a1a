"""``verify`` on combinations without a bug of the features that ``verify-clean`` does not draw.

Four seeded draws of each newer feature, in turn: with at most two others, some of their options, a
layout of 1, 2 or 4 ranks, a model and settings. What planning refuses is drawn again, and so is a
draw in which one of the features has nothing to do.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.plugin_api import AscendRunError, Claim
from ascend_run.tools.verify import layouts
from ascend_run.tools.verify.building import PRECISION, make_side

from . import verify_clean
from .campaign import Campaign, Outcome, digest
from .features import EXCHANGE, config_of, resolution_of, settled
from .verify_clean import DROPOUT, EXPERT_AXES, LAYOUTS, OLDER, SETTINGS

DRAWS: Final = 4
"""Of each newer feature, besides those in which it is one of the others."""
TRIES: Final = 1000
"""Draws until one can be verified: features of experts spread over ranks need about sixty."""
CHOICES: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "alibi": ({}, {"distance": "root"}),
    "cc-lora": ({}, {"slices": 3}, {"merge": True}),
    "coc": ({}, {"parallel_num": 4}, {"recompute_all_gather": False}),
    "compile": ({}, {"regions": "parts"}),
    "eod-reset": ({"eod_token_id": 1}, {"eod_token_id": 1, "reset_position_ids": False}),
    "flash-attention": ({}, {"kernel": "blocks"}),
    "gmm": ({}, {"backend": "loop"}, {"gradient_accumulation_fusion": True}),
    "hybrid-cp": ({}, {"ulysses_degree": 1}, {"kv_cache": "none"}),
    "kv-allgather-cp": ({}, {"groups_at_once": 1}, {"kv_cache": "half"}),
    "mc2": ({}, {"keep_gathered": True}),
    "recompute-in-advance": ({}, {"num_layers": 1}),
    "recompute-in-bubble": ({"num_forwards": 1}, {"num_forwards": 2}),
    "ring-attention": ({}, {"kv_cache": "none"}),
    "rms-norm": ({"kernel": "torch"}, {"kernel": "compile"}),
    "rotary": ({"kernel": "torch"}, {"kernel": "compile"}),
    "smart-swap": ({}, {"activation_mb": 0.05}),
    "swiglu": ({"kernel": "torch"}, {"kernel": "compile"}),
    "ulysses": ({}, {"kv": "all-gather"}, {"kv_cache": "half"}),
}
"""Feature -> some of its options."""
_AXES: Final = {Claim.CONTEXT_PARALLEL: "cp", Claim.LINEAR_COMM: "tp"}
"""What an owner needs to be more than one rank."""
_WINDOW: Final = {"model.window_size": [5, 0]}
NEEDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "generate-mask": _WINDOW,  # it has nothing to share without
    "reuse-fp32-param": {PRECISION: "bf16"},  # there are no master weights in fp32
    "virtual-optimizer": {"plugins.virtual-optimizer.folder": "."},  # for files without names
}
"""Feature -> settings without which it has nothing to do. Those of ``features.CONFIG`` hold where
layouts are compared in fp32 as well."""
BESIDE: Final[Mapping[str, str]] = {
    "cc-lora": "lora",  # it computes its adapters
    "fused-mlp": "lora",  # and so does this
    "qlora": "lora",  # it stores what is frozen beside adapters
    "recompute-comm-opt": "recompute",  # it changes how layers are recomputed
    "recompute-in-advance": "recompute",  # it changes when
}
"""Feature -> the one without which it has nothing to do."""


def cases(seed: int) -> Sequence[str]:
    """JSON: what is asked of ``verify``."""
    return _cases(seed)


@functools.cache
def _cases(seed: int) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for turn, first in itertools.product(range(DRAWS), newer()):
        draws = random.Random(f"{seed} {turn} {first}")
        found[_draw_another(first, draws, found)] = None
    return tuple(found)


def _draw_another(first: str, draws: random.Random, found: Container[str]) -> str:
    """A draw that is none of ``found``.

    Raises:
        LookupError: None in which the features can run and have something to do.
    """
    for _ in range(TRIES):
        drawn = _draw(first, draws)
        if drawn is not None and _can_run(drawn):
            case = json.dumps(drawn, sort_keys=True)
            if case not in found:
                return case
    raise LookupError(
        f"{first}: in none of {TRIES} draws it can run, has something to do, and is another draw "
        "than before; say in NEEDS, BESIDE or features.CONFIG what it needs"
    )


def newer() -> list[str]:
    """Built-in features that ``verify-clean`` does not draw."""
    return [name for name in settled() if name not in OLDER]


def _draw(first: str, draws: random.Random) -> dict[str, Any] | None:
    """None where the features do not go together."""
    chosen = {first, *_draw_others(draws)}
    chosen |= {BESIDE[name] for name in chosen if name in BESIDE}
    resolution = resolution_of(tuple(sorted(chosen)))
    if resolution is None:
        return None
    cut = [axis for claim, axis in _AXES.items() if claim in resolution.owners]
    fitting = [sizes for sizes in LAYOUTS if all(sizes.get(axis, 1) > 1 for axis in cut)]
    layout, model = dict(draws.choice(fitting)), draws.choice(("dense", "moe"))
    if layout.get("cp", 1) > 1 and "cp" not in cut:
        chosen.add(EXCHANGE)
    if model == "moe" and layout.get("tp", 1) > 1:
        layout["sp"] = 1  # experts under tensor parallelism need it
    if model == "moe" and layout.get("tp", 1) * layout.get("cp", 1) * layout.get("dp", 1) > 1:
        layout |= draws.choice(EXPERT_AXES)
    settings = {} if draws.random() < 0.5 else dict(draws.choice((*SETTINGS, _WINDOW)))
    settings |= draws.choice(DROPOUT)
    settings |= config_of(sorted(chosen))
    for name in sorted(chosen):
        settings |= NEEDS.get(name, {})
        options = draws.choice(CHOICES.get(name, ({},)))
        settings |= {f"plugins.{name}.{option}": value for option, value in options.items()}
    if "noop-layers" in chosen and layout.get("pp", 1) > 1:
        settings["model.num_layers"] = 4
    return {"enable": sorted(chosen), "layout": layout, "model": model, "config": settings}


def _draw_others(draws: random.Random) -> Sequence[str]:
    """At most two, by their names, so that a new feature changes few draws of the others."""
    drawn = draws.random()
    in_turn = sorted(settled(), key=lambda name: digest(f"{drawn} {name}"))
    return in_turn[: draws.choice((0, 0, 1, 2))]


def _can_run(drawn: Mapping[str, Any]) -> bool:
    """Whether planning takes it, and each feature has something to do: in fp32, in which ``verify``
    compares most of all, or in the precision that is asked for as well."""
    question = verify_clean.question(drawn)
    sizes = layouts.with_dp(drawn["layout"])
    side = make_side(question, "", question.enable, sizes, drawn["model"], [sizes])
    sides = [side]
    if PRECISION in question.config:
        given = {PRECISION: question.config[PRECISION]}
        sides.append(attrs.evolve(side, values={**side.values, **given}))
    try:
        idle = [{*one.prepare().plan.idle} for one in sides]
    except AscendRunError:
        return False
    return not set.intersection(*idle)


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    """As of ``verify-clean``, and how often each feature was drawn."""
    drawn = Counter(name for case in outcomes for name in json.loads(case)["enable"])
    return {
        **verify_clean.figures(outcomes),
        "combinations of each feature": dict(sorted(drawn.items())),
    }


CAMPAIGN = Campaign(
    name="verify-clean-newer",
    seed=20261123,
    cases=cases,
    run=verify_clean.run,
    figures=figures,
    reach=verify_clean.reach,
)
