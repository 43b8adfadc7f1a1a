"""What is the same in each: a feature that listens and changes nothing."""

from __future__ import annotations

from typing import Any

from ascend_run.plugin_api import Manifest, Numerics, Support, hookimpl


def declared(name: str, **fields: Any) -> Manifest:
    fields = {"numerics": Numerics.BITWISE, "platforms": {"cpu": Support.REAL}, **fields}
    return Manifest(name=name, summary=f"the plugin {name}", level=2, **fields)


class Listens:
    @hookimpl
    def ascend_before_step(self) -> None:
        """Nothing; a plugin must have a hook."""
