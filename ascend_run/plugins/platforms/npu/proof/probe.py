"""Check whether an installed torch_npu takes the calls of this package; CANN may be missing.

``findings`` needs only the files of torch_npu. ``asked`` imports it in a separate process, with
stub libraries if CANN is missing, and runs its meta kernels too.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ascend_run.plugin_api import AscendRunError

from .binding import parse, problems_of
from .calls import Call
from .libraries import installed_schemas
from .stub_libraries import run_beside

RECORD: Final = Path(__file__).parent / "calls.json"


@functools.cache
def known_calls() -> Mapping[str, Call]:
    """Return every variant of a call that this package makes, by name (scripts/npu_schemas.py)."""
    data = json.loads(RECORD.read_text(encoding="utf-8"))
    return {name: Call.from_json(call) for name, call in data.items()}


def findings(package: Path) -> list[str]:
    """Return what the torch_npu in a folder does not support of our calls; empty if all fit.

    torch_npu is read, not imported.
    """
    schemas = installed_schemas(package)
    if not schemas:
        raise AscendRunError(f"no torch_npu in {package}")
    return sorted({f for call in known_calls().values() for f in _findings(call, schemas)})


def _findings(call: Call, schemas: Mapping[str, str]) -> list[str]:
    overloads = [
        parse(schema) for name, schema in schemas.items() if name.partition(".")[0] == call.operator
    ]
    return [f"{call.operator} {problem}" for problem in problems_of(call, overloads)]


def asked(package: Path, calls: Mapping[str, Call]) -> dict[str, Any]:
    """Return what torch_npu reports when it is imported.

    Returns:
        ``version``, ``schemas`` (operator -> schema) and ``results`` (name of a call -> result of
            its meta kernel, or ``{"none": why}``).

    Raises:
        AscendRunError: torch_npu cannot be imported.
    """
    module, root = "ascend_run.plugins.platforms.npu.proof.meta_results", Path(__file__).parents[5]
    with tempfile.TemporaryDirectory() as folder:
        asked_of_it = Path(folder) / "calls.json"
        asked_of_it.write_text(json.dumps({name: call.to_json() for name, call in calls.items()}))
        done = run_beside(package, ["-m", module, str(asked_of_it)], extra_path=[root])
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()[-60:])
        raise AscendRunError(f"torch_npu in {package} cannot be run: {reason}")
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def packages(places: Sequence[str]) -> list[Path]:
    """Return the folders of an import path that hold torch_npu."""
    return [Path(p) for p in places if (Path(p) / "torch_npu/lib/libtorch_npu.so").exists()]
