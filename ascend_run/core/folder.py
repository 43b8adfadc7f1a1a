"""Write the run folder: config, plan, lock file and environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascend_run.plugin_api.errors import StorageError

from .files import replace_file
from .run_files import CONFIG_NAME


def write_run_folder(
    folder: Path,
    *,
    config_toml: str,
    plan_json: str,
    lock: Mapping[str, object],
) -> None:
    """Create the run folder and write the config, plan and lock file.

    Raises:
        StorageError: The files cannot be written.
    """
    files = {
        CONFIG_NAME: config_toml,
        "plan.json": plan_json,
        "plugins.lock.json": json.dumps(lock, indent=1, sort_keys=True),
    }
    _write(folder, files)


def write_environment(folder: Path, environment: Mapping[str, Any]) -> None:
    """Write what the run stands on.

    Raises:
        StorageError: The file system refused.
    """
    _write(folder, {"environment.json": json.dumps(environment, indent=1)})


def _write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text)
    except OSError as error:
        raise StorageError(
            f"cannot write the run folder {folder}: {error.strerror}; set run.output_dir"
        ) from None
