from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ascend_run.tools.generate.texts import Texts

from .serving import Served, counting, tiny_texts


@pytest.fixture(scope="package")
def texts() -> Texts:
    return tiny_texts(Path("none"))


@pytest.fixture(scope="package")
def tiny(texts: Texts) -> Iterator[Served]:
    """One server of the stub for all tests that leave nothing behind."""
    with counting(texts) as server:
        yield server
