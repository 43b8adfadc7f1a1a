"""The pool of ranks of the running pytest session, and what all pools of it share, for functions
that take no fixture."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ascend_run.plugin_api.errors import ConfigError

if TYPE_CHECKING:
    from .pool import GlooPool
    from .rank_processes import ForkServers

SESSION_POOL: ContextVar[Callable[[], GlooPool] | None] = ContextVar("session_pool", default=None)
"""Returns the session's pool; None outside of pytest. Set by ``pytest_plugin``."""
SESSION_SERVERS: ContextVar[Callable[[], ForkServers] | None] = ContextVar(
    "session_servers", default=None
)
"""Returns the processes that all ranks of the session are forked from; None outside of pytest."""


def session_pool() -> GlooPool:
    """Return the pool of the running pytest session; nothing is started yet.

    Raises:
        ConfigError: No pytest session is running.
    """
    pool_of_session = SESSION_POOL.get()
    if pool_of_session is None:
        raise ConfigError(
            "no pool of ranks: pytest is not running; pass one, as in "
            "'with GlooPool() as pool: run(..., pool=pool)'"
        )
    return pool_of_session()
