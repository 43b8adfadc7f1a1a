"""A plugin with something of each kind that a test can read: a metric, saved state, a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ascend_run.plugin_api import Manifest, Metrics, Numerics, RunConfig, RunContext, hookimpl


@attrs.frozen(kw_only=True)
class CountsStepsConfig:
    """Options of the plugin."""

    forgets: bool = False
    """Do not restore the count."""
    fails_in_step: int = 0
    """Step that raises; 0: none."""


@attrs.define
class Count:
    """A CheckpointEntry of the completed steps, over all resumed runs."""

    config: CountsStepsConfig
    steps: int = 0

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = 0 if self.config.forgets else state["steps"]


class CountsSteps:
    """Counts the steps of a run."""

    manifest = Manifest(name="counts-steps", summary="count", numerics=Numerics.BITWISE)
    config_class = CountsStepsConfig

    def __init__(self, config: CountsStepsConfig) -> None:
        self.count = Count(config)

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        if config.data.seq_length == 13:
            return ["data.seq_length=13 is unlucky; use 12 or 14"]
        return ()

    @hookimpl
    def ascend_after_step(self, context: RunContext) -> None:
        self.count.steps += 1
        if context.step == self.count.config.fails_in_step:
            raise ValueError(f"step {context.step} failed")

    @hookimpl
    def ascend_checkpoint_entries(self) -> Mapping[str, Count]:
        return {"counts-steps": self.count}

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, Metrics]:
        return {"counts-steps": lambda context: {"steps": self.count.steps}}
