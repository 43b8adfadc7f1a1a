"""Memory features leave training equal in every bit: alone and in every pair, in every layout.

The features of the group ``memory`` that declare ``bitwise``, in each of thirteen layouts, without
and with full recompute, in float32 and in bf16 (there with the distributed optimizer if the layout
has data parallelism). Each case is a set: one feature with what it requires, or as many as go
together (``covering``), so that every pair that resolution and planning allow there is in one. A
feature that is idle in a setting is in no set of it. A minimal set that planning refuses is a case,
too, which lists the reason.

Twenty steps with dropout, on the same ranks with the features and without them: losses and gradient
norms of all steps, weights after them, gradients of the last one. The last step must also do other
work: what a single feature adds to it is in the outcome.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ascend_run.plugin_api import Numerics
from ascend_run.testing.parity import TRIAL_SECONDS, Case

from .campaign import Campaign, Outcome
from .covering import Items
from .feature_sets import SettingSets, requirements, sets_of, settings
from .features import IN_SETS, catalogue, config_of, numerics_of, settled
from .pool_of_ranks import pool
from .reach import reach_of_trial
from .set_cases import Asked, arguments_of, case_of, cases_of, outcome_of, setting_name
from .setting import Completed, Setting
from .trained_ranks import Trained, differences, effect, emptiness, trained

STEPS: Final = 20
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
PRECISIONS: Final = ("fp32", "bf16")
GROUP: Final = "ascend_run.plugins.memory."
CHOSEN: Final = {
    **IN_SETS,
    "plugins.adaptive-recompute.activation_mb": 0.01,  # less than is kept in bf16 on four ranks
}
"""Options of features under which they do their work in every setting."""
ACTS_ON: Final = {
    "recompute-comm-opt": "recompute",
    "recompute-in-advance": "recompute",
}
"""Feature -> the one whose work it changes; by itself it has nothing to do."""
ELSEWHERE: Final = ("memory-fragmentation",)
"""Features without an effect on the CPU, which has no pools of memory; their own suites have it."""


def memory_features() -> list[str]:
    """Return the features of the group that declare to change no bit."""
    found = catalogue()
    names = (name for name in settled() if found[name].value.startswith(GROUP))
    return [name for name in names if numerics_of(name) is Numerics.BITWISE]


def settings_in(precision: str) -> Iterator[Setting]:
    """Yield the setting of every layout, without and with full recompute."""
    for setting in settings():
        config = {
            **setting.config,
            **DROPOUT,
            "train.precision": precision,
            "train.train_iters": STEPS,
        }
        if precision == "bf16" and {"dp", "cp"} & setting.layout.keys():
            config["ddp.use_distributed_optimizer"] = True
        yield Setting(model=setting.model, layout=setting.layout, config=config)


def needs() -> dict[str, Items]:
    """Return feature -> itself, those that it requires, and the one that it acts on."""
    found = requirements()
    return {
        name: closed | {ACTS_ON[one] for one in closed if one in ACTS_ON}
        for name, closed in found.items()
    }


def alone(setting: Setting) -> dict[str, Completed]:
    """Return feature -> its set without others, of the features that are not idle in a setting."""
    closed = needs()
    made = {name: setting.complete(sorted(closed[name])) for name in memory_features()}
    return {name: found for name, found in made.items() if name not in found.examined.idle}


def cases(seed: int) -> Sequence[str]:
    """Return JSON: plugins, those beside them, model, layout and config; nothing is drawn."""
    return [json.dumps(case, sort_keys=True) for case in _cases()]


@functools.cache
def _cases() -> Sequence[Mapping[str, Any]]:
    chosen = [setting for precision in PRECISIONS for setting in settings_in(precision)]
    singles = [alone(setting) for setting in chosen]
    of_settings = sets_of([*zip(chosen, map(list, singles), strict=True)], needs=needs())
    pairs = zip(of_settings, singles, strict=True)
    return [case for found, single in pairs for case in cases_in(found, single)]


def cases_in(found: SettingSets, singles: Mapping[str, Completed]) -> Iterator[Mapping[str, Any]]:
    """Yield the cases of a setting: those of single features first, each of which is no other
    case."""
    made: list[frozenset[str]] = []
    for name, completed in singles.items():
        if not completed.examined.problems:
            made.append(frozenset(completed.plugins))
            yield {**case_of(found.setting, completed), "single": name}
    yield from (case for case in cases_of(found) if frozenset(case["plugins"]) not in made)


def run(case: str) -> Outcome:
    """Plan a set and compare it; reduce it if that fails."""
    return outcome_of(json.loads(case), compared, lambda: compared)


def compared(asked: Asked) -> Outcome:
    """Compare steps with and without the features; return what a single one adds to a step.

    Raises:
        AssertionError: Something differs, or the comparison shows nothing.
    """
    case = _case(asked)
    ours = _trained(case)
    problems = [*differences(ours, _reference(_other(asked, [])))]
    single = asked.get("single", "")
    acted_on = [ACTS_ON[single]] if single in ACTS_ON else []
    added = effect(ours, _reference(_other(asked, acted_on)))
    if not added and not {*case.plugins} <= {*ELSEWHERE}:
        problems.append("the last step does the same as without the plugins")
    if problems:
        raise AssertionError("\n  ".join([f"{case}:", *problems]))
    return {"compared": True, **({"effect": added} if single else {})}


def _other(asked: Asked, plugins: Sequence[str]) -> str:
    """Return the case with other features; the same for all cases of a setting."""
    where = {key: asked[key] for key in ("model", "layout", "config", "beside")}
    return json.dumps({**where, "plugins": plugins}, sort_keys=True)


@functools.cache
def _reference(asked: str) -> Sequence[Trained]:
    case = _case(json.loads(asked))
    found = _trained(case)
    if problems := [*emptiness(found, STEPS)]:
        raise AssertionError(f"{case}: equality with this run shows nothing: {'; '.join(problems)}")
    return found


def _case(asked: Asked) -> Case:
    return Case(**{**arguments_of(asked), "options": CHOSEN})


def _trained(case: Case) -> Sequence[Trained]:
    trial = case.trial((*case.beside, *case.plugins), steps=STEPS, sharded=True)
    return pool().run(trained, case.world_size, trial, timeout=TRIAL_SECONDS)


def reach(case: str) -> str:
    """Return the hash of all that a case can reach."""
    asked = json.loads(case)
    names = (*asked["plugins"], *asked["beside"])
    own = {key: value for key, value in CHOSEN.items() if key.split(".")[1] in names}
    return reach_of_trial(names, asked["model"], json.dumps([own, config_of(names)]))


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    """Count what was compared, what each feature alone adds to a step, and what was refused."""
    compared: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    effects: dict[str, Counter[str]] = {}
    for case, outcome in outcomes.items():
        asked = json.loads(case)
        if "compared" in outcome:
            compared[f"{setting_name(asked)}, {asked['config']['train.precision']}"] += 1
        elif "refused" in outcome:
            refused[f"{', '.join(asked['plugins'])}: {outcome['refused']}"] += 1
        if "effect" in outcome:
            effects.setdefault(asked["single"], Counter()).update(outcome["effect"])
    return {
        "features": memory_features(),
        "steps": STEPS,
        "compared": compared.total(),
        "compared in each setting": dict(compared),
        "added to one step by each feature, over its cases": {
            name: dict(sorted(found.items())) for name, found in sorted(effects.items())
        },
        "refused": dict(sorted(refused.items())),
    }


CAMPAIGN = Campaign(name="bitwise", seed=0, cases=cases, run=run, figures=figures, reach=reach)
