"""A config file to override."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_configs import SMALLEST


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The smallest that can be used."""
    path = tmp_path / "demo.toml"
    path.write_text(SMALLEST)
    return path
