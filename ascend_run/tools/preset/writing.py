"""Choose a preset's layout and write the config of its run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ascend_run.core.files import replace_file
from ascend_run.plugin_api.error_text import around
from ascend_run.plugin_api.errors import ConfigError, StorageError
from ascend_run.prepare.prepare import prepare_raw
from ascend_run.tools.plan.cost_model.devices import CostDevice

from .choosing import Choice, Search
from .run_file import run_toml
from .runs import DATASET, Request, raw_config, run_values


def refuse_existing(output: Path) -> None:
    """
    Raises:
        StorageError: The file exists, or its folder does not.
    """
    if os.path.lexists(output):
        raise StorageError(f"{output} exists; name a new file with -o")
    if not output.parent.is_dir():
        raise StorageError(f"{output.parent} is not a folder; create it, or name another file")


def written_run(
    request: Request,
    device: CostDevice,
    memory: float,
    output: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Write the config of a preset's run; return what to tell the user.

    Args:
        memory: Memory of a device. Unit: bytes.
        progress: Called with (layouts done, layouts in all).

    Raises:
        ConfigError: The request is invalid, or no layout fits.
        StorageError: The file cannot be written.
    """
    values, choice = chosen_run(request, device, memory, progress)
    text = run_toml(
        request.preset,
        values,
        choice,
        devices=request.devices,
        memory=memory,
        device=device.name,
        file=str(output),
    )
    refuse_existing(output)  # the search takes a while
    try:
        replace_file(output, text)
    except OSError as error:
        raise StorageError(f"{output} cannot be written: {error.strerror}") from None
    comments = text.partition("\n\n")[0].splitlines()
    return [f"{output}:", *(line.removeprefix("#").removeprefix(" ") for line in comments)]


def chosen_run(
    request: Request,
    device: CostDevice,
    memory: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, Any], Choice]:
    """Return all values of a preset's run, with the chosen layout, and the choice.

    Raises:
        ConfigError: The request is invalid, or no layout fits.
    """
    values = run_values(request, _nproc(request.devices, int(device.per_node)))
    try:
        choice = Search(values, request.devices, memory, device, progress).choose()
        experts = "model.num_moe_experts" in values
        values |= choice.best.candidate.values(request.devices, experts=experts)
        prepare_raw(raw_config(values, request.preset.name), request.devices)  # as plan does
    except ConfigError as error:
        raise ConfigError(error.headline, [*error.problems, *_hints(error, request)]) from None
    return values, choice


def _hints(error: ConfigError, request: Request) -> Iterator[str]:
    """Yield the options of ``preset write`` for the files that a task misses."""
    text = str(error)
    missing = {"--data": not request.train, "--tokenizer": request.tokenizer is None}
    options = [option for option, is_missing in missing.items() if is_missing]
    if options and (DATASET in text or "data.tokenizer" in text):
        yield f"name the files of task {request.task!r} with {' and '.join(options)}"


def _nproc(devices: int, per_node: int) -> int:
    """Return the devices of one node.

    Raises:
        ConfigError: The devices are more than a node's, and not whole nodes.
    """
    if devices > per_node and devices % per_node:
        raise ConfigError(
            f"--devices {devices}: expected whole nodes of {per_node} devices; use "
            f"{around(devices, per_node)}"
        )
    return min(devices, per_node)
