"""Treatments of activations that exclude one another, or have no effect. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.core.config.activation_policy import activation_policies
from ascend_run.core.hooks import Hooks
from ascend_run.types.config import RunConfig


def policy_problems(config: RunConfig, hooks: Hooks) -> Iterator[str]:
    """Yield a message for each part with two treatments, and for each plugin that has no effect
    because all that it treats is recomputed already."""
    policies = activation_policies(config, hooks)
    layers: dict[tuple[str, str, str], list[int]] = {}
    for index, policy in policies.items():
        for found in policy.twice:
            layers.setdefault(found, []).append(index)
    for (part, one, other), (first, *more) in layers.items():
        where = f"layer {first}" + (f" and {len(more)} more" if more else "")
        yield (
            f"'{one}' and '{other}' both treat the activations of {part or 'a whole layer'}, in "
            f"{where}; leave out one, or give them other layers or modules"
        )
    outer: dict[str, set[str]] = {}
    for policy in policies.values():
        for (owner, _), around in policy.overruled.values():
            outer.setdefault(owner, set()).add(around)
    named = {owner for policy in policies.values() for owner, _ in policy.treated.values()}
    named |= {name for _, *two in layers for name in two}
    for owner in sorted({*outer} - named):
        yield (
            f"{owner}: all that it treats is within what {' and '.join(sorted(outer[owner]))} "
            "recomputes already; leave out one of them"
        )
    without = {owner for policy in policies.values() for owner in policy.without}
    for owner in sorted(without - named - {*outer}):
        yield (
            f"{owner}: with its options it treats the activations of no layer of this model; "
            f"change them, or leave {owner} out"
        )
