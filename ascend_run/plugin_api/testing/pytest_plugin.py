"""What pytest loads wherever ascend-run is installed: fixtures, and nothing that costs.

No plugin is discovered, no torch imported and no process started before a test asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .parity import Parity
    from .pool import GlooPool


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Ranks that live as long as the session; see ``pool.GlooPool.run``."""
    from .pool import GlooPool

    with GlooPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def parity(gloo_pool: GlooPool) -> Parity:
    """Compares runs with and without a plugin; see ``parity.Parity``."""
    from .parity import Parity
    from .runtime import load_runtime

    return Parity(gloo_pool, load_runtime().numerics_of)
