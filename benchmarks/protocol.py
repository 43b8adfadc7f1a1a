"""How everything here is measured: fresh processes, by turns, with equal threads."""

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
"""Of one process; the slowest compiles a model on two cores."""


class NotMeasured(Exception):
    """A row cannot be measured here; the text says why."""


@attrs.frozen(kw_only=True)
class Settings:
    """How a run measures."""

    pairs: int = 5
    steps: int = 4
    """Timed steps of one process."""
    warmup: int = 1
    repeats: int = 15
    """Runs of a command that has no pair."""
    peers_python: Path = PEERS_PYTHON
    gpu_peers_python: Path = GPU_PEERS_PYTHON
    tell: Callable[[str], None] = lambda _: None
    """Told what is being run."""

    @classmethod
    def quick(cls, **others: Any) -> Settings:
        """As little as shows that the harness works; its figures mean nothing."""
        return cls(pairs=1, steps=1, warmup=1, repeats=1, **others)


def device() -> str:
    """What the figures belong to."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"cpu: {next(names, platform.machine())}, {THREADS} threads"


@attrs.frozen(kw_only=True)
class Benchmark:
    """One row, and how it is measured."""

    name: str
    goal: str
    """For the table where the row could not be measured."""
    measure: Callable[[Settings], Row]
    device: Callable[[], str] = device
    """Where it runs, for the same table; ``rows.NO_GPU`` where it cannot on this machine."""


def environment() -> Mapping[str, str]:
    """Of every measured process: no rank that a starter has left behind, and equal threads."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(THREADS))
    # A backend that torch finds among the installed packages would be timed as well.
    return {**kept, **threads, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def alternating(
    settings: Settings,
    ours: Callable[[], Any],
    peer: Callable[[], Any],
    label: str,
) -> tuple[list[Any], list[Any]]:
    """What each gave, ours and the peer by turns, so that a drift of the machine meets both."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for pair in range(1, settings.pairs + 1):
        settings.tell(f"{label}: pair {pair} of {settings.pairs}, ours")
        found[0].append(ours())
        settings.tell(f"{label}: pair {pair} of {settings.pairs}, peer")
        found[1].append(peer())
    return found


def run(words: Sequence[str | Path], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A command, to its end.

    Raises:
        NotMeasured: It cannot be started, failed, or took too long.
    """
    command = [str(word) for word in words]
    shown = " ".join(command[:6])
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment(),
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


def worker(module: str, *words: str | Path, python: Path | None = None) -> dict[str, Any]:
    """The JSON object in the last line that a worker module prints.

    Args:
        python: Of the peers where the worker is one of theirs; None is this process's own.

    Raises:
        NotMeasured: As ``run``.
    """
    if python is not None and not python.exists():
        raise NotMeasured(f"{python} is missing; `make peers peers-gpu` builds those of all peers")
    done = run([python or sys.executable, "-m", f"benchmarks.{module}", *words])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def wall_seconds(words: Sequence[str | Path], cwd: Path = ROOT) -> float:
    """How long a command takes, from its start to its end."""
    begin = time.perf_counter()
    run(words, cwd)
    return time.perf_counter() - begin
