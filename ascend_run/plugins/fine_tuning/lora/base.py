"""Fingerprint of the base model to which the adapters of a checkpoint belong. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ascend_run.ops.weight_sources import weight_source
from ascend_run.plugin_api import CheckpointError

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import LoraOptions

_EARLIER: Final[Mapping[str, object]] = {
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": [],
}
"""Values of a record of an earlier version, which has none."""


class BaseRecord:
    """Store in the checkpoint what must not change when a run resumes with its adapters.

    Implements contracts.CheckpointEntry.
    """

    def __init__(self, config: RunConfig, options: LoraOptions) -> None:
        self._options = options
        self._base = weight_source(config.model.hf_path, config.run.seed)["digest"]

    def state_dict(self) -> Mapping[str, object]:
        options = self._options
        return {
            "base": self._base,
            "rank": options.rank,
            "alpha": options.alpha,
            "rslora": options.rslora,
            "rank_pattern": dict(options.rank_pattern),
            "alpha_pattern": dict(options.alpha_pattern),
            "modules_to_save": sorted(options.modules_to_save),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check the stored record against this run.

        Raises:
            CheckpointError: The adapters were trained beside other weights, or with another scale.
        """
        now = self.state_dict()
        state = {**_EARLIER, "rank": self._options.rank, **state}
        problems = [
            f"plugins.lora.{name}={now[name]}, but the checkpoint's adapters have {state[name]}"
            for name in now
            if name != "base" and state[name] != now[name]
        ]
        if state["base"] != now["base"] and self._options.checkpoint == "adapters":
            problems.append(
                "the base model differs from that of the checkpoint's adapters; set "
                "model.hf_path (or run.seed, without one) as in the run that saved them"
            )
        if problems:
            raise CheckpointError("the run cannot resume with these adapters", problems)
