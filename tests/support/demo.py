"""The demo's config, and the pytest mark of its tests."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

import pytest

DEMO: Final = Path(__file__).parents[2] / "examples/demo.toml"
NEEDS_ITS_FEATURES: Final = pytest.mark.needs_plugins(*tomllib.loads(DEMO.read_text())["enable"])
