"""RoPE of two kinds of layers in config.json. Torch-free.

transformers 5 writes ``rope_parameters`` with an object for each kind in ``layer_types``; earlier
versions write ``rope_theta`` and ``rope_scaling``, and ``rope_local_base_freq`` for windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

_RULE: Final = "rope_parameters"
_LOCAL: Final = "rope_local_base_freq"
_FULL, _WINDOW = "full_attention", "sliding_attention"


def flatten_rope_parameters(config_json: dict[str, Any]) -> Iterator[str]:
    """Replace the newer spelling by the earlier one in place; yield what that cannot express."""
    rules = config_json.get(_RULE)
    if not isinstance(rules, dict) or _WINDOW not in rules or not rules.keys() <= {_FULL, _WINDOW}:
        return
    config_json[_RULE], local = rules.get(_FULL), dict(rules[_WINDOW] or {})
    base = local.pop("rope_theta", None)
    if base is not None and config_json.setdefault(_LOCAL, base) != base:
        yield f"{_LOCAL} is {config_json[_LOCAL]!r} and {_RULE}.{_WINDOW} has another; leave one"
    if local not in ({}, {"rope_type": "default"}):
        yield f"{_RULE}.{_WINDOW} is {rules[_WINDOW]!r}; only its rope_theta can be set"


def nest_rope_parameters(config_json: dict[str, Any]) -> None:
    """Replace the earlier spelling by the newer one in place, and keep the older keys."""
    if _LOCAL in config_json:
        local = {"rope_theta": config_json[_LOCAL], "rope_type": "default"}
        config_json[_RULE] = {_FULL: config_json[_RULE], _WINDOW: local}
