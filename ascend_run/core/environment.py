"""Describe a run's environment: package versions, device, data files.

The run folder keeps it, so that two runs can be compared even if neither can be repeated.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ascend_run.plugin_api import contracts as c
from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.types.config import RunConfig

FILE_NAME: Final = "environment.json"
FORMAT: Final = 1
_DISTRIBUTIONS: Final = ("ascend-run", "megatron-core", "numpy")
_END_BYTES: Final = 2**20


def environment_of(
    config: RunConfig, device: c.Device, machine_choices: Mapping[str, str]
) -> dict[str, object]:
    """Return the environment of this rank as JSON values; rank 0 writes it for the run.

    Args:
        machine_choices: Choices of the run's plugins (``ascend_machine_choices``).
    """
    return {
        "format": FORMAT,
        "versions": _versions(),
        "device": _device(config, device),
        "machine_choices": dict(machine_choices),
        "data": _data((*config.data.train, *config.data.validation)),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    for name in ("cuda", "hip", "cann"):  # what torch was built for
        if version := getattr(torch.version, name, None):
            found[name] = str(version)
    return found


def _device(config: RunConfig, device: c.Device) -> dict[str, object]:
    """Return what determines floating-point rounding: the processor and how torch uses it."""
    return {
        "platform": config.platform,
        "name": _device_name(device.torch_device),
        "backend": device.backend,
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "system": platform.platform(),
    }


def _device_name(device: torch.device) -> str:
    """Return the name of the accelerator if its torch backend provides it, else the device type."""
    if device.type != "cpu":
        with contextlib.suppress(AttributeError, RuntimeError, AssertionError):
            return str(torch.get_device_module(device).get_device_name(device))
    return device.type


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _data(prefixes: Iterable[str]) -> Mapping[str, object]:
    """Identify the content of token files without reading all of it."""
    return {
        prefix: {"bin": _file(bin_path(prefix)), "idx": _file(idx_path(prefix))}
        for prefix in dict.fromkeys(prefixes)
    }


def _file(path: Path) -> Mapping[str, Any] | None:
    """Return the size and a hash of the first and last MiB, or None if the file is unreadable."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest = hashlib.sha256(stream.read(_END_BYTES))
            stream.seek(max(0, size - _END_BYTES))
            digest.update(stream.read(_END_BYTES))
    except OSError:
        return None
    return {"size_bytes": size, "sha256_of_ends": digest.hexdigest()}
