"""Which weights an adapter in PEFT's format belongs to. Torch-free.

PEFT's settings name the base, by a folder or by a name of the Hub, and PEFT does not compare it
with the weights that an adapter is put on: another model of the same shape is taken. Our files have
a digest of the base's weights in the metadata of the tensors, which other readers ignore. Of a file
without one, the weights in the named folder are compared, if it is on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ascend_run.ops.weight_sources import is_of_folder, weights_differ, weights_digest

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
    does, or if nothing tells.

    Args:
        metadata: Of the file of tensors.
        settings: Content of ``adapter_config.json``.
    """
    named = settings.get("base_model_name_or_path")
    if _BASE not in metadata:
        return _other_folder(named, base)
    if metadata[_BASE] == weights_digest(base):
        return None
    return (
        f"the adapter was trained beside other weights ({named}) than those in {base}; name their "
        "folder, or, if these are the same in another form, write the adapter again without the "
        f"digest: ascend-run convert --to peft --base {base} RUN TARGET"
    )


def _other_folder(named: object, base: str | Path) -> str | None:
    """Return how the weights in a named folder differ from those of the base; None if they do not,
    or if one of the two has no safetensors to compare."""
    if not isinstance(named, str) or not named:
        return None
    if not all(any(Path(folder).glob("*.safetensors")) for folder in (named, base)):
        return None
    if Path(named).samefile(base) or not weights_differ(named, base):
        return None
    return (
        f"the adapter names {named} as its base, whose weights differ from those in {base}; name "
        "that folder, or, if these are the same in another form, set base_model_name_or_path in "
        f"the adapter's adapter_config.json to {base}"
    )
