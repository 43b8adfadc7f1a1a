"""What a run stands on beside its config and plugins: versions, the device, the data files.

Kept in the run folder, so that two runs can be compared where neither can be made again.
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
from ascend_run.plugin_api.config import RunConfig

from .data.indexed import bin_path, idx_path

FILE_NAME: Final = "environment.json"
FORMAT: Final = 1
_DISTRIBUTIONS: Final = ("ascend-run", "megatron-core", "numpy")
_END_BYTES: Final = 2**20


def environment_of(config: RunConfig, device: c.Device) -> dict[str, Any]:
    """JSON values; of rank 0, for the run."""
    return {
        "format": FORMAT,
        "versions": _versions(),
        "device": _device(config, device),
        "data": _data((*config.data.train, *config.data.validation)),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    for name in ("cuda", "hip", "cann"):  # what torch was built for, where it says so
        if version := getattr(torch.version, name, None):
            found[name] = str(version)
    return found


def _device(config: RunConfig, device: c.Device) -> dict[str, Any]:
    """What decides how sums are rounded: the processor, and what torch uses of it."""
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
    """The model of the accelerator, where its part of torch tells."""
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


def _data(prefixes: Iterable[str]) -> Mapping[str, Any]:
    """What tells the content of token files apart, without reading all of it."""
    return {
        prefix: {"bin": _file(bin_path(prefix)), "idx": _file(idx_path(prefix))}
        for prefix in dict.fromkeys(prefixes)
    }


def _file(path: Path) -> Mapping[str, Any] | None:
    """Size, and a hash of the first and the last MiB; None for what is no file."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest = hashlib.sha256(stream.read(_END_BYTES))
            stream.seek(max(0, size - _END_BYTES))
            digest.update(stream.read(_END_BYTES))
    except OSError:
        return None
    return {"size_bytes": size, "sha256_of_ends": digest.hexdigest()}
