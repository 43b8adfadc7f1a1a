"""Which weights an adapter in PEFT's format belongs to. Torch-free.

PEFT's settings name the base, and nothing compares it with the weights that an adapter is put on:
another model of the same shape is taken. Our files have a digest of the base's weights in the
metadata of the tensors, which other readers ignore.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ascend_run.ops.weight_sources import weights_digest

_BASE: Final = "ascend_run.base"


def metadata_of(base: str | Path | None) -> dict[str, str]:
    """Return the metadata of a file of adapters.

    Args:
        base: Hugging Face folder of the weights; None, or a folder that is not there, leaves them
            unnamed.
    """
    named = {} if base is None or not Path(base).is_dir() else {_BASE: weights_digest(base)}
    return {"format": "pt", **named}


def other_base(
    metadata: Mapping[str, str], settings: Mapping[str, Any], base: str | Path
) -> str | None:
    """Return why an adapter does not belong to the weights in a Hugging Face folder; None if it
    does, or if its file does not tell.

    Args:
        metadata: Of the file of tensors.
        settings: Content of ``adapter_config.json``.
    """
    if _BASE not in metadata or metadata[_BASE] == weights_digest(base):
        return None
    named = settings.get("base_model_name_or_path")
    return (
        f"the adapter was trained beside other weights ({named}) than those in {base}; name their "
        "folder, or write the adapter again for this one: ascend-run convert --to peft --base "
        f"{base} RUN TARGET"
    )
