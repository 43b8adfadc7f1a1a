"""The measurement protocol: fresh processes, alternating, with equal numbers of threads."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from .rows import Row

ROOT: Final = Path(__file__).parent.parent
PEERS_PYTHON: Final = ROOT / ".venv-peers" / "bin" / "python"
GPU_PEERS_PYTHON: Final = ROOT / ".venv-peers-gpu" / "bin" / "python"
THREADS: Final = 2
TIMEOUT_SECONDS: Final = 900
"""Limit for one process; the slowest one compiles a model on two cores."""


class NotMeasured(Exception):
    """A row cannot be measured on this machine; the message says why."""


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of the measurement."""

    pairs: int = 5
    steps: int = 4
    """Timed steps per process."""
    warmup: int = 1
    repeats: int = 15
    """Runs of a command that is not compared with another one."""
    peers_python: Path = PEERS_PYTHON
    gpu_peers_python: Path = GPU_PEERS_PYTHON
    report: Callable[[str], None] = lambda _: None
    """Called with a description of what is being run."""

    @classmethod
    def quick(cls, **others: Any) -> Settings:
        """Return minimal settings to test the harness; the results are meaningless."""
        return cls(pairs=1, steps=1, warmup=1, repeats=1, **others)


def device() -> str:
    """Return the device of the results."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"cpu: {next(names, platform.machine())}, {THREADS} threads"


@attrs.frozen(kw_only=True)
class Benchmark:
    """One row, and how it is measured."""

    name: str
    goal: str
    """Shown in the table if the row could not be measured."""
    measure: Callable[[Settings], Row]
    device: Callable[[], str] = device
    """Device, for the same table; ``rows.NO_GPU`` if it needs a GPU and there is none."""


_LEFT_OUT: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONDONTWRITEBYTECODE")
"""With the last one, each process would compile our modules, but not those of installed peers."""


def environment() -> Mapping[str, str]:
    """Return the environment of measured processes: no launcher variables, and equal threads."""
    kept = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(THREADS))
    # Otherwise, loading an installed backend of torch would be timed as well.
    return {**kept, **threads, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def alternating(
    settings: Settings,
    ours: Callable[[], Any],
    peer: Callable[[], Any],
    label: str,
) -> tuple[list[Any], list[Any]]:
    """Run ours and the peer alternately, so that drift affects both; return the results of each."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for pair in range(1, settings.pairs + 1):
        settings.report(f"{label}: pair {pair} of {settings.pairs}, ours")
        found[0].append(ours())
        settings.report(f"{label}: pair {pair} of {settings.pairs}, peer")
        found[1].append(peer())
    return found


def run(
    words: Sequence[str | Path], cwd: Path = ROOT, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command until it exits.

    Args:
        variables: Added to ``environment``.

    Raises:
        NotMeasured: It cannot be started, failed, or took too long.
    """
    command = [str(word) for word in words]
    shown = " ".join(command[:6])
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**environment(), **(variables or {})},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except FileNotFoundError:
        raise NotMeasured(f"{command[0]} is missing") from None
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"{shown}: not done after {TIMEOUT_SECONDS} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotMeasured(f"{shown}: exit code {done.returncode}: {last[:200]}")
    return done


def worker(
    module: str,
    *words: str | Path,
    python: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a worker module and return the JSON object in the last line of its output.

    Args:
        python: Python of the peers' environment, for their workers; None: this process's.
        variables: Added to its environment.

    Raises:
        NotMeasured: As ``run``.
    """
    if python is not None and not python.exists():
        raise NotMeasured(f"{python} is missing; `make peers peers-gpu` builds those of all peers")
    command = [python or sys.executable, "-m", f"benchmarks.{module}", *words]
    done = run(command, variables=variables)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def wall_seconds(
    words: Sequence[str | Path], cwd: Path = ROOT, variables: Mapping[str, str] | None = None
) -> float:
    """Return the duration of a command; see ``run``."""
    begin = time.perf_counter()
    run(words, cwd, variables)
    return time.perf_counter() - begin
