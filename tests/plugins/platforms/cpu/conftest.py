"""Fixture that makes the CPU Megatron's accelerator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ascend_run.plugins.platforms.cpu.device import CpuDevice
from tests.support.cpu_facade import cpu_facade


@pytest.fixture
def active() -> Iterator[CpuDevice]:
    """Yield the device, with its facade active."""
    with cpu_facade() as device:
        yield device
