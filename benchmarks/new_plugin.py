"""Create, install and test a new plugin with the commands that ``new-plugin`` prints."""

from __future__ import annotations

import functools
import shlex
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Final

from .protocol import Benchmark, Settings, device, run
from .rows import Row, bounded

LIMIT_SECONDS: Final = 60.0
"""Limit for the three commands together."""
KINDS: Final = ("feature", "platform", "task", "family")


def benchmarks() -> list[Benchmark]:
    """One row per kind of plugin."""
    return [
        Benchmark(
            name=_name(kind),
            goal=f"<= {LIMIT_SECONDS:g} s",
            measure=functools.partial(_measure, kind),
        )
        for kind in KINDS
    ]


def _name(kind: str) -> str:
    return f"new-plugin --kind {kind}: install, show, test"


def _measure(kind: str, settings: Settings) -> Row:
    settings.report(_name(kind))
    with tempfile.TemporaryDirectory(prefix="ascend-run-new-plugin-") as name:
        folder = Path(name)
        python = environment_in(folder / "venv")
        words = [python, "-m", "ascend_run", "new-plugin", f"timed-{kind}", "--kind", kind]
        printed = run(words, folder).stdout.splitlines()
        commands = [shlex.split(line) for line in printed if line.startswith("  ")]
        seconds = []
        for program, *arguments in commands:
            module = program.replace("-", "_")  # pip, ascend-run, pytest
            begin = time.perf_counter()
            run([python, "-m", module, *arguments], folder)
            seconds.append(time.perf_counter() - begin)
    return bounded(
        name=_name(kind),
        value=sum(seconds),
        unit="s",
        limit=LIMIT_SECONDS,
        note=f"once: {' + '.join(f'{second:.1f}' for second in seconds)} s",
        device=device(),
    )


def environment_in(folder: Path) -> Path:
    """Create an environment for the package, with access to the packages of this one; return its
    Python."""
    run([sys.executable, "-m", "venv", folder])
    (site,) = folder.glob("lib/python*/site-packages")
    here = sysconfig.get_path("purelib")
    # With addsitedir, so that editable installations are visible too.
    (site / "installed_here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return folder / "bin" / "python"
