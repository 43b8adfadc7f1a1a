"""Fingerprint of the base model to which the adapters of a checkpoint belong. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ascend_run.ops.weight_sources import weight_source, weights_digest
from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.error_text import show

from .saved_modules import modules_in_full

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import LoraOptions

_EARLIER: Final[Mapping[str, object]] = {
    "dora": False,
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
        self.base = weight_source(config.model.hf_path, config.run.seed)["digest"]
        """Digest of the weights beside the adapters."""
        self._in_full = sorted(modules_in_full(config, options))
        folder = options.load
        self._loaded = None if folder is None else weights_digest(folder, "adapter_config.json")
        self._saved_loaded = self._loaded

    def state_dict(self) -> Mapping[str, object]:
        options = self._options
        return {
            "base": self.base,
            "loaded": self._loaded,
            "rank": options.rank,
            "alpha": options.alpha,
            "rslora": options.rslora,
            "dora": options.dora,
            "rank_pattern": dict(options.rank_pattern),
            "alpha_pattern": dict(options.alpha_pattern),
            "modules_to_save": self._in_full,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check the stored record against this run.

        Raises:
            CheckpointError: The adapters were trained beside other weights, or with another scale.
        """
        now = self.state_dict()
        state = {**_EARLIER, "rank": self._options.rank, **state}
        problems = [
            f"plugins.lora.{name}={show(now[name])}, but the checkpoint's adapters have "
            f"{show(state[name])}"
            for name in now
            if name not in ("base", "loaded") and state[name] != now[name]
        ]
        if state["base"] != now["base"] and self._options.checkpoint == "adapters":
            problems.append(
                "the base model differs from that of the checkpoint's adapters; set "
                "model.hf_path (or run.seed, without one) as in the run that saved them"
            )
        if problems:
            raise CheckpointError("the run cannot resume with these adapters", problems)
        self.base = state["base"]
        self._saved_loaded = state.get("loaded", self._loaded)

    def require_same_load(self) -> None:
        """Check that the run resumed beside the adapters that it began with.

        Raises:
            CheckpointError: ``plugins.lora.load`` has changed, so the reference would.
        """
        if self._saved_loaded != self._loaded:
            raise CheckpointError(
                f"plugins.lora.load={self._options.load} holds other adapters than the run began "
                "with, which are part of its reference; name the folder that it began with, or "
                "start from scratch with another run.output_dir"
            )
