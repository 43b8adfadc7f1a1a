"""How flags of Megatron and MindSpeed map to our config: data, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

ENABLE: Final = "enable"
"""The ``key`` of a flag that enables its plugin."""
ANY: Final = "*"
"""In ``values``: any other argument of the flag."""


def _is_a_flag(instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if not value.startswith("--") or len(value.split()) != 1:
        raise ValueError(f"{attribute.name} {value!r} must be one word, such as '--my-flag'")


def _stands_alone() -> Mapping[str | None, object]:
    return {"": True}


@attrs.frozen(kw_only=True)
class LegacyFlag:
    """One flag and one config key that it sets.

    A flag that sets two keys has two records. If several records set the same key, the last one
    wins. Keys of a plugin's options apply only to runs that enable the plugin.

    Examples:
        >>> LegacyFlag(flag="--use-ascend-mc2")  # enables its plugin
        >>> LegacyFlag(flag="--swap-modules", key="plugins.swap-attention.modules", values=None)
        >>> LegacyFlag(flag="--sparse-mode", key="plugins.generate-mask.form",
        ...            values={"0": "whole", "2": "compressed"})
    """

    flag: str = attrs.field(validator=_is_a_flag)  #: One word, with its dashes.
    key: str = ENABLE
    """The config key that it sets; ``enable`` (true or false) to enable the plugin itself; empty if
    nothing needs to be set, because the flag's effect is always on."""
    values: Mapping[str | None, Any] | None = attrs.field(factory=_stands_alone)
    """Argument of the flag -> value of the key. ``""``: the flag has no argument; None: the flag is
    absent; ``ANY``: any argument that is not listed; other arguments set nothing. If ``values`` is
    None, the argument is the value, written as on our command line; several arguments are joined by
    commas."""
    plus: int = 0
    """Only if ``values`` is None: added to the argument, if the two systems count differently."""
    where: Mapping[str, str] = attrs.field(factory=dict)
    """Other flags and the arguments that they must have for this record to apply."""

    def __attrs_post_init__(self) -> None:
        if self.plus and self.values is not None:
            raise ValueError(f"{self.flag}: plus needs values=None, so that the argument is used")

    def __str__(self) -> str:
        """The flag, with the arguments that enable the plugin."""
        words = (self.values or {}) if self.key == ENABLE else {}
        named = "|".join(word for word, on in words.items() if word and word != ANY and on)
        return f"{self.flag} {named}" if named else self.flag
