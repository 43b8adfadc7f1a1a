"""Jobs for gloo ranks: steps, and where optimizer states and master weights are between them."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import attrs

from ascend_run.plugin_api import StorageError
from benchmarks.live_storages import mapped_files
from tests.support.small_runs import Training, Values, training
from tests.support.stepping_jobs import Readings, live_tensors, storage_bytes, take_steps

REPORT_BYTES = 24


@attrs.frozen
class Steps:
    """What a rank had after each step."""

    readings: Readings
    digests: list[str]
    """Of every tensor of the checkpoint, master weights and moments included."""
    state_bytes: int
    """Bytes of states and master weights that are not in a file, between steps."""
    live_bytes: int
    """Bytes of all tensors of the job that are not in a file, between steps."""
    file_bytes: int
    """Bytes of the files between steps."""
    most_bytes: int
    """Bytes that a step adds to the tensors that are not in a file, when the optimizer steps."""


def stepwise(
    values: Values,
    enable: Sequence[str],
    steps: int,
    overflowing: Collection[int] = (),
    every: int = 1,
) -> Steps:
    """Take steps, some of which overflow; look at the state every so many steps."""
    from ascend_run.core.checkpoint.optimizer_shards import stepped_parameters

    before = live_tensors()
    old = {t.untyped_storage().data_ptr() for t in before}
    with training(values, enable) as run:
        readings, digests = take_steps(run, steps, overflowing, every)
        most = _added_by_a_step(run)
        run.bundle.optimizer.zero_grad()  # type: ignore[union-attr]
        items = [*stepped_parameters(run.bundle.optimizer)]
        held = [tensor for item in items for tensor in item.inner.state[item.stepped].values()]
        held += [item.stepped for item in items if item.stepped.dtype != item.parameter.dtype]
        of_files = mapped_files()
        new = [t for t in live_tensors() if t.untyped_storage().data_ptr() not in old]
        return Steps(
            readings,
            digests,
            state_bytes=storage_bytes([t for t in held if not of_files(t)]),
            live_bytes=storage_bytes([t for t in new if not of_files(t)]),
            file_bytes=storage_bytes([t for t in new if of_files(t)]),
            most_bytes=most,
        )


def anonymous_bytes(values: Values, enable: Sequence[str]) -> int:
    """Return what a model and its states add to the memory of the process that is in no file."""
    before = _anonymous()
    with training(values, enable) as run:
        run.step()
        run.bundle.optimizer.zero_grad()  # type: ignore[union-attr]
        return _anonymous() - before


def peak_bytes(values: Values, enable: Sequence[str]) -> int:
    """Return what a step adds at most to the resident memory of the process: the second one, before
    which states and what libraries keep exist."""
    with training(values, enable) as run:
        run.step_with_events()
        _return_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident
        before = _of_status("VmRSS")
        run.step_with_events()
        return _of_status("VmHWM") - before


def without_room(values: Values, enable: Sequence[str]) -> str:
    """Return the error of a run that finds a full disk."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reserve, os.posix_fallocate = os.posix_fallocate, full
    try:
        with training(values, enable) as run:
            run.step()
            return ""
    except StorageError as error:
        return str(error)
    finally:
        os.posix_fallocate = reserve


def _added_by_a_step(run: Training) -> int:
    """Take one more step, and return what exists in it beside what did when its update began."""
    sizes: list[int] = []
    for part in run.bundle.optimizer.chained_optimizers:  # type: ignore[union-attr]
        _watch(part, sizes)
    run.step()
    return max(sizes)


def _watch(part: Any, sizes: list[int]) -> None:
    of_files = mapped_files()

    def size() -> int:
        # Without the three numbers of a step: gloo's thread lets go of them when it comes to it.
        counted = [t for t in live_tensors() if t.untyped_storage().nbytes() > REPORT_BYTES]
        return storage_bytes([t for t in counted if not of_files(t)])

    update, step = part.update, part.optimizer.step
    before: list[int] = []

    def watched_update() -> None:
        before[:] = [size()]
        update()

    def watched_step() -> None:
        step()
        sizes.append(size() - before[0])

    part.update, part.optimizer.step = watched_update, watched_step


def _anonymous() -> int:
    _return_freed_memory()
    return _of_status("RssAnon")


def _return_freed_memory() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # to the system


def _of_status(name: str) -> int:
    """Return a size of this process. Unit: bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
