"""Features of which some make a run diverge, alone or together."""

from __future__ import annotations

from typing import Any

import attrs

from ascend_run.plugin_api import Manifest, Numerics, hookimpl
from ascend_run.plugin_api import contracts as c


def manifest(name: str, numerics: Numerics = Numerics.BITWISE) -> Manifest:
    return Manifest(name=name, summary="made for a test", numerics=numerics)


class Harmless:
    """Base: leaves every layer as it is."""

    def change(self, layer: Any) -> None:
        return

    @hookimpl
    def ascend_layer(self, layer_index: int) -> c.ModuleWrapper:
        def wrap(layer: Any) -> Any:
            if layer_index == 1:
                self.change(layer)
            return layer

        return wrap


def harmless(number: int) -> type[Harmless]:
    name = f"Harmless{number}"
    members = {"manifest": manifest(f"harmless-{number}"), "__module__": __name__}
    return type(name, (Harmless,), members)


Harmless0, Harmless1, Harmless2, Harmless3 = map(harmless, range(4))
Harmless4, Harmless5, Harmless6 = map(harmless, range(4, 7))
HARMLESS = (Harmless0, Harmless1, Harmless2, Harmless3, Harmless4, Harmless5, Harmless6)


class Rounds(Harmless):
    """Declares rounding."""

    manifest = manifest("rounds", Numerics.ROUNDING)


@attrs.frozen(kw_only=True)
class Level:
    level: int = 0


class HasAnOption(Harmless):
    manifest = manifest("has-an-option")
    config_class = Level

    def __init__(self, config: Level) -> None:
        self.config = config


class DoublesAGradient(Harmless):
    manifest = manifest("doubles-a-gradient")

    def change(self, layer: Any) -> None:
        layer.mlp.linear_fc2.weight.register_hook(lambda gradient: 2 * gradient)


class Marks(Harmless):
    """Harmless, except for ``DoublesIfMarked``."""

    manifest = manifest("marks")

    def change(self, layer: Any) -> None:
        layer.is_marked = True


class DoublesIfMarked(Harmless):
    """Harmless, except with ``Marks``."""

    manifest = manifest("doubles-if-marked")

    def change(self, layer: Any) -> None:
        layer.mlp.linear_fc2.weight.register_hook(
            lambda gradient: 2 * gradient if hasattr(layer, "is_marked") else gradient
        )
