"""A job for gloo ranks: what a step writes to files and reads from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import attrs
from torch import Tensor

from ascend_run.ops.transfer.file_copier import FileCopier
from tests.support.small_runs import Values, training


@attrs.define
class FileTraffic:
    """Bytes that a ``FileCopier`` copies."""

    written: int = 0
    read: int = 0


def file_traffic(values: Values, enable: Sequence[str], steps: int) -> FileTraffic:
    """Take steps; return the traffic of the last one."""
    with training(values, enable) as run:
        for _ in range(steps):
            with _counted() as found:
                run.step_with_events()
    return found


@contextmanager
def _counted() -> Iterator[FileTraffic]:
    found = FileTraffic()
    to_host, to_device = FileCopier.to_host, FileCopier.to_device

    def write(self: FileCopier, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        found.written += tensor.nbytes
        return to_host(self, tensor, out)

    def read(self: FileCopier, host: Tensor, out: Tensor) -> None:
        found.read += host.nbytes
        to_device(self, host, out)

    with patch.multiple(FileCopier, to_host=write, to_device=read):
        yield found
