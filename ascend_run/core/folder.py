"""The run folder: what a run writes beside its checkpoints, metrics and log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascend_run.plugin_api.errors import StorageError

from .files import replace_file


def write_run_folder(
    folder: Path,
    *,
    config_toml: str,
    plan: Mapping[str, Any],
    lock: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> None:
    """Create the folder and write what the run was asked to be, and what it stands on.

    Raises:
        StorageError: The file system refused.
    """
    files = {
        "config.toml": config_toml,
        "plan.json": json.dumps(plan, indent=1),
        "plugins.lock.json": json.dumps(lock, indent=1, sort_keys=True),
        "environment.json": json.dumps(environment, indent=1),
    }
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text)
    except OSError as error:
        raise StorageError(
            f"cannot write the run folder {folder}: {error.strerror}; set run.output_dir"
        ) from None
