"""Reference implementations of the NPU's operators on the CPU, by their public documentation.

They are defined under ``torch.ops.npu`` with torch_npu's own schemas and run on CPU tensors, so
that the plugin's own code path runs. Where the documentation of an operator states limits (dtypes
aside, so that float64 tests the arithmetic), the reference raises if they are violated. One module
per kind; each function in them that has the name of an operator is its reference, and is found
automatically.

Source: the operator documentation in torch_npu 2.13, and the API reference of Ascend Extension for
PyTorch.
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
OPERATORS = {*RECORD["schemas"]}


def _collect() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for name, value in vars(module).items():
            if name in OPERATORS and getattr(value, "__module__", "") == module.__name__:
                assert name not in found, f"{name} is written twice"
                found[name] = value
    return found


IMPLEMENTATIONS = _collect()


@functools.cache
def define_reference_operators() -> torch.library.Library:
    """Define ``torch.ops.npu`` as torch_npu declares it, computing on the CPU, in this process."""
    library = torch.library.Library("npu", "DEF")
    for name, schema in RECORD["schemas"].items():
        library.define(schema.removeprefix("npu::"))
        # An operator without tensors among its arguments is for no device in particular.
        key = "CPU" if "Tensor" in schema.rpartition(" -> ")[0] else "CompositeExplicitAutograd"
        library.impl(schema.removeprefix("npu::").partition("(")[0], IMPLEMENTATIONS[name], key)
    return library
