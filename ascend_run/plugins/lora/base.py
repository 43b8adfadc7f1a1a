"""Which base the adapters of a checkpoint belong to. No torch."""

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
"""Of each file's beginning and end."""


class BaseRecord:
    """contracts.CheckpointEntry: what must be the same where a run goes on with its adapters."""

    def __init__(self, config: RunConfig, options: LoraOptions) -> None:
        self._options = options
        self._base = _base(config)

    def state_dict(self) -> Mapping[str, Any]:
        options = self._options
        return {"base": self._base, "alpha": options.alpha, "rslora": options.rslora}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises:
        CheckpointError: The adapters were trained beside other weights, or scaled otherwise.
        """
        now = self.state_dict()
        problems = [
            f"plugins.lora.{name}={now[name]}, but the checkpoint's adapters have {state[name]}"
            for name in ("alpha", "rslora")
            if state[name] != now[name]
        ]
        if state["base"] != now["base"] and self._options.checkpoint == "adapters":
            problems.append(
                "the base model is another one than the adapters were trained beside; "
                "model.hf_path (or run.seed, without one) must be what it was"
            )
        if problems:
            raise CheckpointError("these adapters cannot be gone on with", problems)


def _base(config: RunConfig) -> str:
    """Fingerprint of a Hugging Face folder by the ends of its files, or the seed."""
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
