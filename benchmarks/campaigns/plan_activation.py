"""``plan`` against what happens: who is called, in which order, over every set of plugins.

The plugins are the ten features that there are, by name, and with them the second task and the
second model family: twelve. Each subset that resolution allows is planned and then really run:
one rank, one layer, one step, with evaluation, log and checkpoint. Every hook that the plan lists
must be called, for just the owners that it names and in that order; no other may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from ascend_run.plugin_api import AscendRunError
from ascend_run.plugin_api.hook_kinds import HookKind
from ascend_run.prepare.plan.explanation import HookOwners
from ascend_run.registry.discovery import discover
from ascend_run.registry.resolution import resolve
from ascend_run.tools.plan.costs import with_costs

from .called_hooks import Call, called_hooks
from .campaign import PASSED, Campaign, Outcome
from .tiny_runs import data_folder, prepare, train

FEATURES: Final = (
    "compile",
    "deterministic",
    "gloo-offload",
    "gmm",
    "lora",
    "noop-layers",
    "ring-attention",
    "swap-attention",
    "tensorboard",
    "ulysses",
)
TASK: Final = "sft"
"""In place of pretrain."""
FAMILY: Final = "mixtral"
"""In place of llama: its layers have experts in place of a dense feed-forward."""
PLUGINS: Final = (*FEATURES, TASK, FAMILY)
NONE: Final = "none"

ONLY_WITH_EXPERTS: Final = frozenset({"ascend_moe_layer", "ascend_token_dispatcher"})
ONLY_WITHOUT_EXPERTS: Final = frozenset({"ascend_mlp"})


def cases(seed: int) -> Sequence[str]:
    """Every subset that resolution allows; nothing is drawn."""
    classes = discover().load([*PLUGINS, "pretrain", "llama", "cpu"])

    def allowed(names: Sequence[str]) -> bool:
        task = TASK if TASK in names else "pretrain"
        family = FAMILY if FAMILY in names else "llama"
        features = [name for name in names if name in FEATURES]
        try:
            resolve([*features, task, family, "cpu"], classes)
        except AscendRunError:
            return False
        return True

    subsets = (s for size in range(len(PLUGINS) + 1) for s in combinations(PLUGINS, size))
    return ["+".join(names) or NONE for names in subsets if allowed(names)]


def run(case: str) -> Outcome:
    """Plan a set and run it, in this process."""
    names = () if case == NONE else case.split("+")
    experts = FAMILY in names
    values: dict[str, Any] = {}
    if "noop-layers" in names:  # a place beside the one layer
        values = {"model.num_layers": 2, "plugins.noop-layers.layers": [1]}
    if "swap-attention" in names:  # a tiny model's tensors are small
        values["plugins.swap-attention.min_bytes"] = 1
    with called_hooks() as calls:
        prepared = with_costs(
            prepare(
                data_folder(),
                [name for name in names if name in FEATURES],
                task=TASK if TASK in names else "pretrain",
                model="moe" if experts else "dense",
                values=values,
            )
        )
        train(prepared)
    problems = list(disagreements(prepared.plan.hooks, calls, unreached(experts=experts)))
    figures = {"hooks": len(prepared.plan.hooks), "calls": len(calls)}
    if problems:
        return {"verdict": "disagrees", "why": "; ".join(problems), **figures}
    return {"verdict": PASSED, **figures}


def unreached(*, experts: bool) -> frozenset[str]:
    """Hooks that a run does not come to, as it has no part of that kind."""
    return ONLY_WITHOUT_EXPERTS if experts else ONLY_WITH_EXPERTS


def disagreements(
    planned: Sequence[HookOwners], calls: Sequence[Call], not_reached: frozenset[str]
) -> Iterator[str]:
    """Where the hooks of a plan are not what was called; a sentence each."""
    owners = {hook.hook: list(hook.owners) for hook in planned}
    for hook in dict.fromkeys(call.hook for call in calls):
        if hook not in owners:
            yield f"{hook} was called and is not in the plan"
        if hook in not_reached:
            yield f"{hook} was called in a run that should not come to it"
    for entry in planned:
        hook, names = entry.hook, owners[entry.hook]
        if hook in not_reached:
            continue
        made = [call for call in calls if call.hook == hook]
        asked = [call for call in made if call.what != "applied"]
        if not asked:
            yield f"{hook} is planned for {names} and no plugin was called"
        elif entry.kind == HookKind.PROVIDER:
            yield from _provided(hook, names, asked)
        elif not _is_repeated([call.plugin for call in asked], names):
            yield f"{hook} is planned for {names}; called: {[call.plugin for call in asked]}"
        elif entry.kind == HookKind.WRAPPER:
            yield from _wrapped(hook, names, asked, made)


def _provided(hook: str, names: Sequence[str], asked: Sequence[Call]) -> Iterator[str]:
    """Each time: in order, up to the first who answers."""
    place = 0
    for call in asked:
        if call.plugin != names[place]:
            yield f"{hook} is planned for {names}; '{call.plugin}' was asked as number {place}"
            return
        place = 0 if call.what == "asked" or place == len(names) - 1 else place + 1
    if place:
        yield f"{hook} is planned for {names}; no plugin after '{names[place - 1]}' was asked"


def _wrapped(
    hook: str, names: Sequence[str], asked: Sequence[Call], made: Sequence[Call]
) -> Iterator[str]:
    """What those answered who always answer is applied in their order, innermost first, at least
    as often as they were asked; nothing of those who never do."""
    silent = {call.plugin for call in asked if call.what == "none"}
    always = [name for name in names if name not in silent]
    applied = [call.plugin for call in made if call.what == "applied"]
    results = sum(call.plugin in always for call in asked)
    of_always = [name for name in applied if name in always]
    if len(of_always) < results or not _is_repeated(of_always, always):
        yield f"{hook} is planned as {names} around one another; applied: {applied}"
    answering = {call.plugin for call in asked if call.what == "asked"}
    for name in sorted(set(applied) - answering):
        yield f"{hook}: '{name}' wraps and answered nothing"


def _is_repeated(found: Sequence[str], cycle: Sequence[str]) -> bool:
    """Whether it is the cycle, some number of times."""
    times = len(found) // len(cycle) if cycle else 0
    return [*found] == [*cycle] * times


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    """How much was compared."""
    return {
        "plugins": [*PLUGINS],
        "allowed_subsets": len(outcomes),
        "all_subsets": 2 ** len(PLUGINS),
        "hooks_compared": sum(o.get("hooks", 0) for o in outcomes.values()),
        "calls_seen": sum(o.get("calls", 0) for o in outcomes.values()),
    }


CAMPAIGN = Campaign(name="plan-activation", seed=0, cases=cases, run=run, figures=figures)
