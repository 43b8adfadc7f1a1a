"""Prepare this process before ranks start. Imports no torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .prepare import ResolvedRun

_READ_AT_START: Final = ("PYTHON", "LD_", "GLIBC_", "MALLOC_")
"""Variables with these prefixes are read once, when a process starts."""


def set_environment(prepared: ResolvedRun, nproc: int) -> list[str]:
    """Set the environment variables that must be set before torch is imported.

    Returns:
        Variables that only take effect in child processes, since this process has already started.

    Raises:
        ConfigError: A plugin needs another value than the user has set.
    """
    from ascend_run.core.hooks import Hooks
    from ascend_run.plugin_api.errors import ConfigError

    wanted = Hooks(prepared.instances()).merge(
        "ascend_environment", config=prepared.config, local_world_size=nproc
    )
    problems = [
        f"{name}={os.environ[name]!r}: an enabled plugin needs {value!r}; set it to that"
        for name, value in wanted.items()
        if os.environ.get(name, value) != value
    ]
    if problems:
        raise ConfigError("environment variables conflict with this run", problems)
    too_late = [
        name
        for name, value in wanted.items()
        if name.startswith(_READ_AT_START) and os.environ.get(name) != value
    ]
    os.environ.update(wanted)
    # A torch_npu without its libraries would break the import of torch itself.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    return too_late


def check_run_data(prepared: ResolvedRun) -> None:
    """Check the token files, unless a plugin provides the dataset and checks its own.

    Raises:
        DataError: Lists all problems of all datasets.
    """
    from ascend_run.types.declarations import Claim

    if prepared.config.data.train and Claim.DATASET not in prepared.resolution.owners:
        from ascend_run.text.dataset_checks import check_data

        check_data(prepared.config)
