"""Settings of the process that plugins hold for the length of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ascend_run.plugin_api.config import RunConfig

from .hooks import Hooks


@contextmanager
def process_settings(config: RunConfig, hooks: Hooks) -> Iterator[None]:
    """Every plugin's, entered in resolved order and put back in reverse, whatever happens."""
    settings = hooks.merge("ascend_process_settings", config=config)
    with ExitStack() as stack:
        for setting in settings.values():
            stack.enter_context(setting)
        yield
