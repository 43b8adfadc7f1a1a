"""The plan as a drawing needs it: hooks sorted by point, each with what stands around what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from ascend_run.plugin_api import hookspecs

from .run_folder import items

PREFIX: Final = "ascend_"

POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "Model build": (
        *("model_family", "configure", "platform_ops", "norm", "activation", "rotary"),
        *("embedding", "linear", "mlp", "layer", "output_layer", "loss", "model"),
    ),
    "Attention": ("attention_kernel", "attention", "self_attention", "sequence_partition"),
    "MoE": ("router", "token_dispatcher", "experts", "moe_layer"),
    "Optimizer": ("data_parallel", "param_groups", "optimizer", "activation_policy", "schedule"),
    "Checkpoint": ("checkpoint_store", "checkpoint_entries", "checkpoint_filter"),
    "Comm": ("process_groups", "collectives", "comm_options", "environment", "pipeline_payload"),
}
"""The six points in the order of the flow, and the hooks of each; the others serve the run."""
_KNOWN: Final = frozenset(
    name.removeprefix(PREFIX) for name in vars(hookspecs) if name.startswith(PREFIX)
)
AROUND: Final = "The run around them"

SERVICES: Final = (
    *("check", "patches", "device", "task", "dataset", "batch", "metrics", "report"),
    *("before_run", "before_step", "after_step", "after_log", "before_evaluation"),
    *("after_evaluation", "after_checkpoint", "after_failure", "after_run"),
)
"""The hooks around the six points."""

_WRAPPED: Final[Mapping[str, str]] = {"attention": "attention_kernel", "optimizer": "optimizer"}
"""Wrapper -> the provider whose answer it wraps; elsewhere the kernel's own is inside."""


@attrs.frozen
class Seam:
    """One hook with its owners."""

    name: str
    """Without the prefix."""
    kind: str
    owners: tuple[str, ...]
    """Innermost (or first asked, or first told) first."""
    inside: str | None
    """What a wrapper's innermost owner wraps; None for a hook that wraps nothing."""


def seams_by_point(plan: Mapping[str, Any]) -> dict[str, list[Seam]]:
    """Every hook that somebody implements, under its point; all points are there."""
    hooks = items(plan.get("hooks"))
    owners = {_name(hook): _owners(hook) for hook in hooks}
    grouped: dict[str, list[Seam]] = {point: [] for point in (*POINTS, AROUND)}
    point_of = {name: point for point, names in POINTS.items() for name in names}
    for hook in hooks:
        name, kind = _name(hook), str(hook.get("kind", ""))
        if not owners[name]:
            continue
        inside = None
        if kind == "wrapper":
            inner = owners.get(_WRAPPED.get(name, ""), ())
            inside = inner[0] if inner else f"ascend-run's own {name.replace('_', ' ')}"
        seam = Seam(name, kind, owners[name], inside)
        grouped[point_of.get(name, AROUND)].append(seam)
    return grouped


def free_hooks(point: str, seams: list[Seam]) -> list[str]:
    """Hooks of a point that nobody took, where ascend-run's own stands."""
    taken = {seam.name for seam in seams}
    return [name for name in POINTS.get(point, ()) if name in _KNOWN - taken]


def _name(hook: Mapping[str, Any]) -> str:
    return str(hook.get("hook", "?")).removeprefix(PREFIX)


def _owners(hook: Mapping[str, Any]) -> tuple[str, ...]:
    owners = hook.get("owners")
    return tuple(str(owner) for owner in owners) if isinstance(owners, list) else ()
