"""Record torch_npu's schemas and meta results of the operators that platform npu calls.

    python scripts/npu_schemas.py FOLDER

FOLDER has an unpacked torch_npu wheel for the torch of this environment. It is not installed, since
torch would load it automatically. Without CANN it is imported with stub libraries
(``ascend_run/plugins/platforms/npu/proof/stub_libraries.py``); schemas and meta kernels do not need
CANN.

It writes two files. ``tests/plugins/platforms/npu/schemas.json``: the version, the schema of each
operator, and the shapes and dtypes that its meta kernel returns for
``tests/plugins/platforms/npu/calls``, which makes each call through the platform's ``operators``;
null if there is no meta kernel, with the reason under ``without_meta``.
``ascend_run/plugins/platforms/npu/proof/calls.json``: the calls, to check against the torch_npu of
another machine. A call that does not match its schema is an error.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ascend_run.plugins.platforms.npu.proof import probe, stub_libraries
from ascend_run.plugins.platforms.npu.proof.binding import parse, problems_of
from ascend_run.plugins.platforms.npu.proof.calls import Call
from ascend_run.plugins.platforms.npu.proof.meta_results import describe
from ascend_run.plugins.platforms.npu.proof.releases import REFERENCE

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "tests/plugins/platforms/npu/schemas.json"
_INSIDE = "--beside-torch-npu"


def operators_called() -> Iterator[str]:
    """Yield the operators of ``torch.ops.npu`` that the platform's package calls."""
    modules = (ROOT / "ascend_run/plugins/platforms/npu/operators").glob("*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in modules)
    yield from sorted(set(re.findall(r"torch\.ops\.npu\.(\w+)", source)))


def inside() -> dict[str, Any]:
    """Run every call on meta tensors; torch_npu must be importable."""
    import torch

    torch_npu: Any = importlib.import_module("torch_npu")
    registrations: Any = importlib.import_module("torch_npu.op_plugin.meta._meta_registrations")
    # torch_npu queries the device generation before it warns, once, about its attention.
    registrations._npu_fusion_attention_warning_printed = True
    from ascend_run.plugins.platforms.npu.proof.recording import recorded_calls
    from tests.plugins.platforms.npu.calls import CALLS

    content: dict[str, Any] = {"version": torch_npu.__version__, "calls": {}, "meta": {}}
    content["without_meta"] = {}
    for name, call in CALLS.items():
        with recorded_calls() as recorder:
            try:
                content["meta"][name] = describe(call(torch.device("meta")))
            except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                content["meta"][name] = None
                # torch_npu appends a line with the time and the number of the process.
                words = " ".join(str(error).partition("[ERROR]")[0].split())
                registered = not isinstance(error, NotImplementedError)
                why = f"its meta kernel fails: {words[:160]}" if registered else "it has none"
                content["without_meta"][name] = why
        for number, made in enumerate(recorder.calls, start=1):
            key = name if number == 1 else f"{name} #{number}"
            content["calls"][key] = made.to_json()
    calls = [Call.from_json(call) for call in content["calls"].values()]
    content["schemas"] = {
        name: schema_taking([call for call in calls if call.operator == name])
        for name in operators_called()
    }
    return content


def schema_taking(calls: Sequence[Call]) -> str:
    """Return the schema of the overload that takes all calls of one operator."""
    import torch

    packet = getattr(torch.ops.npu, calls[0].operator)
    schemas = [str(getattr(packet, overload)._schema) for overload in packet.overloads()]
    return next(s for s in schemas if not any(problems_of(call, [parse(s)]) for call in calls))


def in_lines(content: Mapping[str, Any]) -> str:
    """Format JSON with one line per table entry, for readable diffs."""
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
    done = stub_libraries.run_beside(package, [__file__, _INSIDE], extra_path=[ROOT])
    if done.returncode != 0:
        sys.exit(done.stderr)
    content = json.loads(done.stdout.splitlines()[-1])
    version = content["version"].partition("+")[0]
    if version != REFERENCE:
        sys.exit(f"{package} holds torch_npu {version}; the calls are recorded with {REFERENCE}")
    calls = {name: Call.from_json(call) for name, call in content["calls"].items()}
    again = probe.asked(package, calls)
    if again["results"].keys() != calls.keys():
        sys.exit("the recorded calls differ from those that were run on torch_npu")
    written = {"torch_npu": version, "schemas": content["schemas"], "meta": content["meta"]}
    written["without_meta"] = content["without_meta"]
    OUTPUT.write_text(in_lines(written), encoding="utf-8")
    probe.RECORD.write_text(in_lines(content["calls"]), encoding="utf-8")
    print(f"{OUTPUT.relative_to(ROOT)}: {len(content['meta'])} calls")


if __name__ == "__main__":
    main()
