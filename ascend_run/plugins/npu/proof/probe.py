"""Ask an installed torch_npu whether it takes the calls of this package; CANN may be missing.

``schemas_of`` and ``findings`` need nothing but the files of torch_npu. ``asked`` imports it in a
process of its own, beside stand-ins where CANN is missing, and asks its meta kernels too.
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
from .stand_ins import run_beside

RECORD: Final = Path(__file__).parent / "calls.json"


@functools.cache
def known_calls() -> Mapping[str, Call]:
    """Every form of a call that this package makes, each under a name (tools/npu_schemas.py)."""
    data = json.loads(RECORD.read_text(encoding="utf-8"))
    return {name: Call.from_json(call) for name, call in data.items()}


def findings(package: Path) -> list[str]:
    """What the torch_npu in a folder does not take of the calls that are made; empty where all is
    well. It is read, not imported."""
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
    """torch_npu's own words: ``version``, ``schemas`` (operator -> schema) and ``answers`` (name
    of a call -> what its meta kernel gives, or ``{"none": why}``).

    Raises:
        AscendRunError: It cannot be imported.
    """
    module, root = "ascend_run.plugins.npu.proof.answers", Path(__file__).parents[4]
    with tempfile.TemporaryDirectory() as folder:
        asked_of_it = Path(folder) / "calls.json"
        asked_of_it.write_text(json.dumps({name: call.to_json() for name, call in calls.items()}))
        done = run_beside(package, ["-m", module, str(asked_of_it)], extra_path=[root])
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()[-60:])
        raise AscendRunError(f"torch_npu in {package} cannot be asked: {reason}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def packages(places: Sequence[str]) -> list[Path]:
    """Folders of an import path that hold torch_npu."""
    return [Path(p) for p in places if (Path(p) / "torch_npu/lib/libtorch_npu.so").exists()]
