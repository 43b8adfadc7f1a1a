"""Strict parsing of a Hugging Face folder's JSON files. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from ascend_run.plugin_api.errors import AscendRunError, CheckpointError, ConfigError
from ascend_run.text.strict_json import unique_keys

_LARGEST_JSON_BYTES: Final = 64 * 2**20  # an index of a model with 200,000 tensors is 20 MB


def read_hf_config(folder: str | Path) -> dict[str, object]:
    """Read the ``config.json`` of a Hugging Face folder.

    Raises:
        ConfigError: The folder or file does not exist, or is not a JSON object with unique keys.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(
            f"no Hugging Face folder at {root}; model.hf_path must name a folder on this machine"
        )
    return read_object(root / "config.json", ConfigError)


def model_type_of(folder: str | Path) -> str:
    """Return the ``model_type`` of a Hugging Face folder, by default the model's family.

    Raises:
        ConfigError: As ``read_hf_config``, or the key is missing or not text.
    """
    found = read_hf_config(folder).get("model_type")
    if not isinstance(found, str):
        raise ConfigError(f"{folder}/config.json names no model_type; set model.family")
    return found


def read_object(file: Path, error: type[AscendRunError] = CheckpointError) -> dict[str, object]:
    """Read a JSON object from a file; duplicate keys are an error."""
    if not file.is_file():
        raise error(f"{file.parent} has no {file.name}")
    try:
        size = file.stat().st_size
        if size > _LARGEST_JSON_BYTES:
            raise error(f"{file}: {size} bytes are too many for this file; it is not what it seems")
        content = json.loads(file.read_text("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as problem:  # UnicodeDecodeError is a ValueError
        raise error(f"{file}: not valid JSON: {problem}") from None
    except OSError as problem:
        raise error(f"{file}: cannot be read: {problem.strerror}") from None
    if not isinstance(content, dict):
        raise error(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content
