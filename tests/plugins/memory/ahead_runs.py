"""Runs of the plugins that recompute ahead of the backward, against those without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial


def outcomes(
    name: str,
    pool: GlooPool,
    config: Mapping[str, Any],
    beside: tuple[str, ...] = (),
    ranks: int = 2,
    steps: int = 0,
) -> tuple[list[RankOutcome], list[RankOutcome]]:
    """Return the outcomes without the plugin of this name and with it."""
    plain, ours = (
        Trial(
            plugins=plugins,
            config={
                key: value
                for key, value in config.items()
                if name in plugins or not key.startswith(f"plugins.{name}.")
            },
            steps=steps,
            counted=not steps,
        )
        for plugins in (beside, (name, *beside))
    )
    return pool.run(run_trial, ranks, plain), pool.run(run_trial, ranks, ours)


def recomputed_layers(name: str, outcome: RankOutcome) -> tuple[float, float]:
    """Return the layers that the last step recomputed ahead of their backward, and in it."""
    ahead, in_backward = (outcome.metrics[f"{name}/{count}"] for count in ("ahead", "in_backward"))
    return ahead, in_backward
