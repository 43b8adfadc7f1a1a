"""Parse and format layouts such as ``tp=2,cp=2,sp``. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from ascend_run.plugin_api.errors import ConfigError
from ascend_run.types.layout import AXIS_KEYS

KEYS: Final[Mapping[str, str]] = {**AXIS_KEYS, "sp": "parallel.sequence_parallel"}
OF_STAGES: Final = (
    "model.pipeline_model_parallel_layout",
    "model.num_layers_in_first_pipeline_stage",
    "model.num_layers_in_last_pipeline_stage",
    "model.account_for_embedding_in_pipeline_split",
    "model.account_for_loss_in_pipeline_split",
    "parallel.overlap_p2p_comm",
)
"""Settings that are only valid with pipeline parallelism."""
AXES: Final = (*KEYS, "dp")


def parse_layout(word: str) -> dict[str, int]:
    """Return axis -> size; ``sp`` has size 1.

    Raises:
        ConfigError: Lists every part that is not an axis with a size.
    """
    sizes: dict[str, int] = {}
    problems = []
    for part in filter(None, (part.strip() for part in word.split(","))):
        axis, equals, size = part.partition("=")
        if axis == "sp" and not equals:
            sizes["sp"] = 1
        elif axis not in AXES or not size.isdigit() or int(size) < 1 or (axis == "sp"):
            problems.append(
                f"{part!r} is not a valid part of a layout; expected sp, or one of "
                f"{', '.join(a for a in AXES if a != 'sp')} with a size, as in tp=2"
            )
        elif axis in sizes:
            problems.append(f"{axis} is given twice in {word!r}; give it once")
        else:
            sizes[axis] = int(size)
    if problems:
        raise ConfigError("invalid layout", problems)
    return sizes


def with_dp(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the layout with ``dp``; by default the smallest that its expert axes allow."""
    if "dp" in sizes:
        return dict(sizes)
    experts = sizes.get("ep", 1) * sizes.get("expt_tp", 1)
    dense = sizes.get("tp", 1) * sizes.get("cp", 1)
    return {**sizes, "dp": math.lcm(experts, dense) // dense}


def settings(sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return config key -> value for every axis, to override those of a config file."""
    values: dict[str, Any] = {
        key: sizes.get(axis, 1)
        for axis, key in KEYS.items()
        if axis not in ("vpp", "sp", "expt_tp")
    }
    values[KEYS["sp"]] = bool(sizes.get("sp", 0))
    for axis in ("vpp", "expt_tp"):
        if axis in sizes:
            values[KEYS[axis]] = sizes[axis]
    return values


def shown(sizes: Mapping[str, int]) -> str:
    """Format the layout, without axes of size 1."""
    parts = [
        "sp" if axis == "sp" else f"{axis}={size}"
        for axis, size in sizes.items()
        if size > 1 or axis == "sp"
    ]
    return ",".join(parts) or "one rank"
