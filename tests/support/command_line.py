"""Runs a command line in a separate process, and reports which modules it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

_PROBE = """
import json, sys
before = {*sys.modules}
from ascend_run.entrypoints.cli import run
code = run(sys.argv[1:])
print()
print(json.dumps([code, sorted({*sys.modules} - before)]))
"""


def imported_by(arguments: Sequence[str]) -> tuple[int, set[str]]:
    """Return the exit code, and every imported module outside the standard library."""
    process = subprocess.run(
        [sys.executable, "-c", _PROBE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    code, modules = json.loads(process.stdout.splitlines()[-1])
    return code, {name for name in modules if top(name) not in sys.stdlib_module_names}


def top(module: str) -> str:
    """Return the top-level package of a module."""
    return module.partition(".")[0]
