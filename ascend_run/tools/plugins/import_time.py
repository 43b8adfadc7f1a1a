"""Time the import of a module in a new process, by package."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Final

import attrs

SLOW_MILLISECONDS: Final = 100.0
"""A slower import is named: every command that reads the plugin's manifest waits for it."""
_TIMEOUT_SECONDS: Final = 60.0
_MOST: Final = 5
"""Packages that are named."""
_BEGIN: Final = "ascend-run import time begins"
_LINE: Final = re.compile(r"import time:\s*(\d+) \|\s*\d+ \|\s*([\w.]+)")
_PROGRAM: Final = f"""
import sys
*search_path, name = sys.argv[1:]
sys.path[:] = search_path
import ascend_run.plugin_api, os, time
print("{_BEGIN}", file=sys.stderr, flush=True)
begin = time.perf_counter()
__import__(name)  # the interpreter does not time what importlib.import_module imports
seconds = time.perf_counter() - begin
sys.stderr.flush()
print("", seconds, sep="\\n", flush=True)
os._exit(0)
"""


@attrs.frozen
class ImportTime:
    """What importing a plugin's module takes, without the plugin API, which all plugins import."""

    milliseconds: float
    packages: Mapping[str, float]
    """The packages that took most: package -> milliseconds in its modules."""
    slow_above_milliseconds: float = SLOW_MILLISECONDS

    @property
    def is_slow(self) -> bool:
        return self.milliseconds > self.slow_above_milliseconds

    def __str__(self) -> str:
        shown = f"{self.milliseconds:.0f} ms"
        if not self.is_slow:
            return shown
        parts = ", ".join(f"{name} {taken:.0f} ms" for name, taken in self.packages.items())
        return (
            f"{shown}, slow (above {self.slow_above_milliseconds:.0f} ms): {parts}; import and "
            "compute in the hooks what only they need"
        )


def import_time(module: str) -> ImportTime | None:
    """Import a module in a new process with this one's ``sys.path``; None if that fails."""
    command = [sys.executable, "-I", "-X", "importtime", "-c", _PROGRAM, *sys.path, module]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
        seconds = float(process.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return None
    taken: Counter[str] = Counter()
    for own, name in _LINE.findall(process.stderr.partition(_BEGIN)[2]):
        taken[name.partition(".")[0]] += int(own)
    packages = {name: round(own / 1000, 1) for name, own in taken.most_common(_MOST) if own >= 1000}
    return ImportTime(round(seconds * 1000, 1), packages)
