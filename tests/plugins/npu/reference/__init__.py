"""The NPU's operators on the CPU, each by the formula of its public documentation.

They are defined under ``torch.ops.npu`` with torch_npu's own schemas and run on CPU tensors, so
that the plugin's very code path computes. Where an operator has limits that its documentation
states (dtypes aside, so that float64 shows the arithmetic), the reference refuses what breaks them.
A module a kind; each function named ``npu_...`` in them is the reference of the operator of that
name, and nothing has to be listed here.
Source: the operator documentation that torch_npu 2.13 carries, and the API reference of Ascend
Extension for PyTorch.
"""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RECORD = json.loads((Path(__file__).parent.parent / "schemas.json").read_text(encoding="utf-8"))


def _collect() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for name, value in vars(module).items():
            if name.startswith("npu_") and getattr(value, "__module__", "") == module.__name__:
                assert name not in found, f"{name} is written twice"
                found[name] = value
    return found


IMPLEMENTATIONS = _collect()


@functools.cache
def define_reference_operators() -> torch.library.Library:
    """Let ``torch.ops.npu`` be as torch_npu declares it, computing on the CPU, in this process."""
    library = torch.library.Library("npu", "DEF")
    for name, schema in RECORD["schemas"].items():
        library.define(schema.removeprefix("npu::"))
        library.impl(name, IMPLEMENTATIONS[name], "CPU")
    return library
