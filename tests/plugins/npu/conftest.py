"""The NPU's operators, on the CPU, for every test here."""

from __future__ import annotations

import pytest

from .reference import define_reference_operators


@pytest.fixture(autouse=True, scope="session")
def operators_on_the_cpu() -> None:
    define_reference_operators()
