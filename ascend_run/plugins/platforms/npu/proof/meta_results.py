"""Results of torch_npu's meta kernels; runs in a process with stub libraries (probe.py).

    python -m ascend_run.plugins.platforms.npu.proof.meta_results FILE

FILE holds JSON, name -> call. The result is the last line on standard output.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .calls import Call


def describe(value: Any) -> Any:
    """Describe a result by shapes and dtypes, as JSON; null for an output that is left empty."""
    if isinstance(value, torch.Tensor):
        if value.shape == (0,):
            return None
        return [[*value.shape], str(value.dtype).removeprefix("torch.")]
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    return value


def result(call: Call) -> Any:
    """Return the result of a meta kernel, or why there is none."""
    device = torch.device("meta")
    args = [value.rebuilt(device) for value in call.positional]
    kwargs = {name: value.rebuilt(device) for name, value in call.by_name}
    try:
        return describe(getattr(torch.ops.npu, call.operator)(*args, **kwargs))
    except NotImplementedError:
        return {"none": "torch_npu registers none"}
    except Exception as error:  # any error of a meta kernel is a finding
        return {"none": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def main(file: Path) -> None:
    torch_npu: Any = importlib.import_module("torch_npu")
    registrations: Any = importlib.import_module("torch_npu.op_plugin.meta._meta_registrations")
    # Its one-time warning about fused attention would query the device's generation.
    registrations._npu_fusion_attention_warning_printed = True
    calls: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    operators = {call["operator"] for call in calls.values()}
    content = {
        "version": torch_npu.__version__,
        "schemas": {
            name: [str(getattr(packet, overload)._schema) for overload in packet.overloads()]
            for name in sorted(operators)
            for packet in (getattr(torch.ops.npu, name),)
        },
        "results": {name: result(Call.from_json(call)) for name, call in calls.items()},
    }
    print(json.dumps(content))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
