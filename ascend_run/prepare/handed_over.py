"""A prepared run as JSON values, passed from a launcher to its ranks. No torch.

A rank does not resolve plugins, check or plan again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.plugin_api.contracts import CommOptions
from ascend_run.registry.discovery import discover

from .config.loading import build_config
from .config.printing import render_toml
from .config.reading import raw_of_toml
from .instances import instances, options_of
from .plan.json_values import plan_text
from .prepare import PreparedRun

if TYPE_CHECKING:
    from ascend_run.core.run import RunRequest


@attrs.frozen(kw_only=True)
class HandedOver:
    """A prepared run without classes: plugins by name, config as text."""

    config_toml: str
    plugins: list[str]
    """Canonical names in resolved order."""
    idle: dict[str, str]
    plan_json: str
    lock: dict[str, Any]
    comm_options: dict[str, dict[str, Any]]
    """Maps process groups to the fields of their ``CommOptions``."""

    @classmethod
    def of(cls, prepared: PreparedRun) -> HandedOver:
        """Extract what the ranks of a prepared run need."""
        return cls(
            config_toml=render_toml(prepared.resolved),
            plugins=[plugin.manifest.name for plugin in prepared.resolution.order],
            idle=dict(prepared.idle),
            plan_json=plan_text(prepared.plan),
            lock=dict(prepared.lock),
            comm_options={group: attrs.asdict(o) for group, o in prepared.comm_options.items()},
        )

    def as_json(self) -> dict[str, Any]:
        """Return the fields, from which ``HandedOver(**values)`` is built again."""
        return attrs.asdict(self, recurse=False)

    def run_request(self) -> RunRequest:
        """Build the run request with new plugin instances.

        Raises:
            AscendRunError: A plugin cannot be imported here.
        """
        from ascend_run.core.run import RunRequest

        raw = raw_of_toml(self.config_toml, "config.toml")
        loaded = discover().load(self.plugins)
        order = [loaded[name] for name in self.plugins]
        options = {plugin.manifest.name: options_of(plugin) for plugin in order}
        config = build_config(raw, options, {}, raw.enable).config
        return RunRequest(
            config=config,
            config_toml=self.config_toml,
            plugins=instances(order, config),
            idle=self.idle,
            plan_json=self.plan_json,
            lock=self.lock,
            comm_options={group: CommOptions(**o) for group, o in self.comm_options.items()},
        )
