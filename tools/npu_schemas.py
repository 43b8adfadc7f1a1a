"""What torch_npu says of the operators that platform npu calls, written down for the tests.

    python tools/npu_schemas.py FOLDER

FOLDER holds an unpacked torch_npu wheel for the torch of this environment. It is never installed:
torch would load it by itself. Without CANN it imports beside stand-ins
(``ascend_run/plugins/npu/proof/stand_ins.py``). Schemas and meta kernels are torch_npu's own and
need no more.

It writes two files. ``tests/plugins/npu/schemas.json``: the version, the schema of each operator,
and the shapes and dtypes that its meta kernel answers to ``tests/plugins/npu/calls``, which makes
each call through ``plugins/npu/operators``; where there is no answer, null, and under
``without_meta`` the reason. ``ascend_run/plugins/npu/proof/calls.json``: the calls themselves,
which a machine's own torch_npu can be asked about. A call that the schema does not take fails here.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ascend_run.plugins.npu.proof import probe, stand_ins
from ascend_run.plugins.npu.proof.answers import describe
from ascend_run.plugins.npu.proof.calls import Call
from ascend_run.plugins.npu.proof.releases import REFERENCE

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "tests/plugins/npu/schemas.json"
_INSIDE = "--beside-torch-npu"


def operators_called() -> Iterator[str]:
    """Names behind ``torch.ops.npu`` in the one package that calls them."""
    modules = (ROOT / "ascend_run/plugins/npu/operators").glob("*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in modules)
    yield from sorted(set(re.findall(r"torch\.ops\.npu\.(\w+)", source)))


def inside() -> dict[str, Any]:
    """Every call on meta tensors, where torch_npu can be imported."""
    import torch

    torch_npu: Any = importlib.import_module("torch_npu")
    registrations: Any = importlib.import_module("torch_npu.op_plugin.meta._meta_registrations")
    # Before it warns, once, of its own attention, it asks the device for its generation.
    registrations._npu_fusion_attention_warning_printed = True
    from ascend_run.plugins.npu.proof.recording import recorded_calls
    from tests.plugins.npu.calls import CALLS

    content: dict[str, Any] = {"version": torch_npu.__version__, "calls": {}, "meta": {}}
    content["without_meta"] = {}
    for name, call in CALLS.items():
        with recorded_calls() as recorder:
            try:
                content["meta"][name] = describe(call(torch.device("meta")))
            except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                content["meta"][name] = None
                words = " ".join(str(error).split())
                registered = not isinstance(error, NotImplementedError)
                why = f"its meta kernel fails: {words[:160]}" if registered else "it has none"
                content["without_meta"][name] = why
        for number, made in enumerate(recorder.calls, start=1):
            key = name if number == 1 else f"{name} #{number}"
            content["calls"][key] = made.to_json()
    content["schemas"] = {
        name: str(getattr(torch.ops.npu, name).default._schema) for name in operators_called()
    }
    return content


def in_lines(content: Mapping[str, Any]) -> str:
    """JSON with a line for each entry of its tables, so that a change is seen where it is."""
    parts = []
    for key, value in content.items():
        if isinstance(value, dict) and not {"operator", "positional"} <= value.keys():
            lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(value.items())]
            table = ",\n".join(lines)
            parts.append(f" {json.dumps(key)}: {{\n{table}\n }}")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    if sys.argv[1] == _INSIDE:
        print(json.dumps(inside()))
        return
    package = Path(sys.argv[1])
    done = stand_ins.run_beside(package, [__file__, _INSIDE], extra_path=[ROOT])
    if done.returncode != 0:
        sys.exit(done.stderr)
    content = json.loads(done.stdout.splitlines()[-1])
    version = content["version"].partition("+")[0]
    if version != REFERENCE:
        sys.exit(f"{package} holds torch_npu {version}; the calls are recorded with {REFERENCE}")
    calls = {name: Call.from_json(call) for name, call in content["calls"].items()}
    again = probe.asked(package, calls)
    if again["answers"].keys() != calls.keys():
        sys.exit("the recorded calls are not those that torch_npu was asked about")
    written = {"torch_npu": version, "schemas": content["schemas"], "meta": content["meta"]}
    written["without_meta"] = content["without_meta"]
    OUTPUT.write_text(in_lines(written), encoding="utf-8")
    probe.RECORD.write_text(in_lines(content["calls"]), encoding="utf-8")
    print(f"{OUTPUT.relative_to(ROOT)}: {len(content['meta'])} calls")


if __name__ == "__main__":
    main()
