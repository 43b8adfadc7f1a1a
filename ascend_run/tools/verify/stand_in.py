"""Implements the hooks whose mere implementation changes a run, for the run without a plugin.

Otherwise a plugin that returns None from such a hook would seem to act. Imports no torch.
"""

from __future__ import annotations

from typing import Any, Final

from ascend_run.plugin_api import Manifest, hookimpl
from ascend_run.plugin_api.implementations import implementations

NAME: Final = "verify-implements-hooks"
_HOOKS: Final = ("ascend_output_layer",)
"""The loss is fused with an output layer that no plugin wraps."""


class StandIn:
    """Implements the hooks, and does nothing."""

    manifest = Manifest(name=NAME, summary="implements hooks for verify, and does nothing")

    @hookimpl
    def ascend_output_layer(self) -> None:
        """Leave the output layer as it is."""


def needs_stand_in(plugin: Any) -> bool:
    """Return whether a plugin implements one of the hooks."""
    return bool(implementations(plugin).keys() & set(_HOOKS))
