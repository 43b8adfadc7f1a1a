"""The pytest plugin of ascend-run: fixtures, and conformance checks for ``--ascend-plugin``.

pytest loads it in every project, so nothing is discovered, imported or started until a test needs
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .session_pool import SESSION_POOL, SESSION_SERVERS

if TYPE_CHECKING:
    from .parity import Parity
    from .pool import GlooPool
    from .rank_processes import ForkServers

_POOL = pytest.StashKey["GlooPool"]()
_SERVERS = pytest.StashKey["ForkServers"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ascend-run", "conformance checks of ascend-run plugins")
    group.addoption(
        "--ascend-plugin",
        metavar="NAME",
        action="append",
        default=[],
        help="check this installed plugin; without a path, only the checks are collected",
    )
    group.addoption(
        "--ascend-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a config key for the trials of --ascend-plugin, such as plugins.NAME.min_bytes=1",
    )
    group.addoption(
        "--ascend-timeout",
        metavar="SECONDS",
        type=float,
        default=100.0,
        help="limit of each trial of --ascend-plugin; default: 100",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    servers = SESSION_SERVERS.set(lambda: _shared_servers(config))
    config.add_cleanup(lambda: SESSION_SERVERS.reset(servers))
    config.add_cleanup(lambda: _close_servers(config))
    pool = SESSION_POOL.set(lambda: shared_pool(config))
    config.add_cleanup(lambda: SESSION_POOL.reset(pool))
    if config.getoption("--ascend-plugin"):
        # Imported late, since most projects do not need the checks.
        from .conformance_items import configure

        configure(config)


def _shared_servers(config: pytest.Config) -> ForkServers:
    if _SERVERS not in config.stash:
        from .rank_processes import ForkServers

        config.stash[_SERVERS] = ForkServers()
    return config.stash[_SERVERS]


def _close_servers(config: pytest.Config) -> None:
    if _SERVERS in config.stash:
        config.stash[_SERVERS].close()


def shared_pool(config: pytest.Config) -> GlooPool:
    """Return the session's pool of ranks, shared by fixtures and checks."""
    if _POOL not in config.stash:
        from .pool import GlooPool

        pool = GlooPool()
        config.stash[_POOL] = pool
        config.add_cleanup(pool.close)
    return config.stash[_POOL]


@pytest.fixture(scope="session")
def gloo_pool(pytestconfig: pytest.Config) -> GlooPool:
    """Ranks that live as long as the session; see ``pool.GlooPool.run``."""
    return shared_pool(pytestconfig)


@pytest.fixture(scope="session")
def parity(gloo_pool: GlooPool) -> Parity:
    """Compares runs with and without a plugin; see ``parity.Parity``."""
    from .parity import Parity
    from .runtime import load_runtime

    return Parity(gloo_pool, load_runtime().numerics_of)
