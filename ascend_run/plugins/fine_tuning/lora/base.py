"""Fingerprint of the base model to which the adapters of a checkpoint belong. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ascend_run.plugin_api import CheckpointError

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import LoraOptions

_SAMPLE_BYTES: Final = 2**20
"""Bytes hashed at the start and at the end of each file."""


class BaseRecord:
    """Store in the checkpoint what must not change when a run resumes with its adapters.

    Implements contracts.CheckpointEntry.
    """

    def __init__(self, config: RunConfig, options: LoraOptions) -> None:
        self._options = options
        self._base = _base(config)

    def state_dict(self) -> Mapping[str, object]:
        options = self._options
        return {
            "base": self._base,
            "rank": options.rank,
            "alpha": options.alpha,
            "rslora": options.rslora,
            "rank_pattern": dict(options.rank_pattern),
            "alpha_pattern": dict(options.alpha_pattern),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check the stored record against this run.

        Raises:
            CheckpointError: The adapters were trained beside other weights, or with another scale.
        """
        now = self.state_dict()
        state = {"rank": self._options.rank, "rank_pattern": {}, "alpha_pattern": {}, **state}
        problems = [
            f"plugins.lora.{name}={now[name]}, but the checkpoint's adapters have {state[name]}"
            for name in ("rank", "alpha", "rslora", "rank_pattern", "alpha_pattern")
            if state[name] != now[name]
        ]
        if state["base"] != now["base"] and self._options.checkpoint == "adapters":
            problems.append(
                "the base model differs from that of the checkpoint's adapters; set "
                "model.hf_path (or run.seed, without one) as in the run that saved them"
            )
        if problems:
            raise CheckpointError("the run cannot resume with these adapters", problems)


def _base(config: RunConfig) -> str:
    """Return a fingerprint of a Hugging Face folder by the ends of its files, or of the seed."""
    if config.model.hf_path is None:
        return f"seed {config.run.seed}"
    digest = hashlib.sha256()
    folder = Path(config.model.hf_path)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
