"""Which weights an adapter in PEFT's format belongs to. Torch-free.

PEFT's settings name the base, and nothing compares it with the weights that an adapter is put on:
another model of the same shape is taken. Our files have a digest of the base's weights in the
metadata of the tensors, which other readers ignore.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ascend_run.ops.weight_sources import is_of_folder, weights_digest

_BASE: Final = "ascend_run.base"


def metadata_of(digest: str | None) -> dict[str, str]:
    """Return the metadata of a file of adapters.

    Args:
        digest: ``weight_source``'s, of the base; None, or that of initial weights, which no folder
            holds, leaves the base unnamed.
    """
    if digest is None or not is_of_folder(digest):
        return {"format": "pt"}
    return {"format": "pt", _BASE: digest}


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
        "folder, or, if these are the same in another form, write the adapter again without the "
        f"digest: ascend-run convert --to peft --base {base} RUN TARGET"
    )
