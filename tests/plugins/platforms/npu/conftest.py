"""The NPU's operators on the CPU for every test of this folder; each call is checked."""

from __future__ import annotations

import pytest

from ascend_run.plugins.platforms.npu.proof.recording import Recorder
from tests.support.npu_calls import npu_calls

from .reference import define_reference_operators

__all__ = ["npu_calls"]


@pytest.fixture(autouse=True, scope="session")
def operators_on_the_cpu() -> None:
    define_reference_operators()


@pytest.fixture(autouse=True)
def checked_calls(npu_calls: Recorder) -> Recorder:
    return npu_calls
