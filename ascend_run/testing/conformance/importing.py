"""Check in a separate process that importing a plugin has no side effects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from . import import_probe
from .subject import Subject

SECONDS = 1.0
"""Limit for importing the plugin's modules, without those of the plugin API."""
TIMEOUT_SECONDS = 60.0
HEAVY = frozenset({"torch", "megatron", "numpy", "scipy", "pandas", "transformers", "tensorboard"})
_HOW = "move it into the hook that needs it"


def imports_quietly(subject: Subject) -> Iterator[str]:
    """Check that importing it imports no heavy module, writes no file or output, and does not
    change the process state."""
    module = subject.plugin.__module__
    try:
        process = subprocess.run(
            [sys.executable, "-I", import_probe.__file__, *sys.path, module],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
            env=subject.means.environment,
        )
    except subprocess.TimeoutExpired:
        yield f"importing {module} takes more than {TIMEOUT_SECONDS:g} s"
        return
    lines = process.stdout.splitlines()
    if process.returncode or not lines or not lines[-1].startswith(import_probe.MARK):
        end = process.stderr.strip().splitlines()[-1:] or ["no message"]
        yield f"importing {module} alone fails with exit code {process.returncode}: {end[0]}"
        return
    seen = json.loads(lines[-1].removeprefix(import_probe.MARK))
    heavy = sorted(HEAVY.intersection(seen["modules"]))
    if heavy:
        yield f"importing {module} imports {', '.join(heavy)}; {_HOW}"
    if seen["seconds"] > SECONDS:
        yield f"importing {module} takes {seen['seconds']:.1f} s, at most {SECONDS:g} s; {_HOW}"
    printed = [line for line in (*lines[:-1], *process.stderr.splitlines()) if line]
    if printed:
        yield f"importing {module} prints {printed[0]!r}; log from a hook instead"
    for event in dict.fromkeys(seen["events"]):
        yield f"importing {module} {event}; {_HOW}"
    for change in seen["changes"]:
        yield f"importing {module} changes {change}; {_HOW}"
