"""The three ways in which config.json has written rotary positions. Torch-free.

transformers 5 writes ``rope_parameters: {"rope_theta": ..., "rope_type": "default"}``; before it,
``rope_theta`` stood alone beside ``rope_scaling``, whose type key was ``type`` or ``rope_type``.
"""

from __future__ import annotations

from typing import Any, Final

_SCALING_KEYS: Final = ("rope_parameters", "rope_scaling")


def take_rope(config_json: dict[str, Any]) -> list[str]:
    """Replace every spelling by one ``rope_theta`` (in place), where any gives it.

    Returns:
        What is wrong: a scaled rope, a part of the head left unrotated, two different bases.
    """
    problems = []
    thetas = {"rope_theta": config_json.pop("rope_theta")} if "rope_theta" in config_json else {}
    for key in _SCALING_KEYS:
        parameters = config_json.pop(key, None)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            problems.append(f"{key} is {parameters!r}; expected an object or null")
            continue
        problems.extend(_problems(key, parameters))
        if "rope_theta" in parameters:
            thetas[f"{key}.rope_theta"] = parameters["rope_theta"]
    if (
        len({repr(float(v)) if isinstance(v, int | float) else repr(v) for v in thetas.values()})
        > 1
    ):
        seen = ", ".join(f"{name} = {value!r}" for name, value in thetas.items())
        problems.append(f"two different rotary bases: {seen}; leave one")
    elif thetas:
        config_json["rope_theta"] = next(iter(thetas.values()))
    return problems


def rope_keys(theta: float) -> dict[str, Any]:
    """What is written for a default rope: the new spelling and the old one, for older readers."""
    return {
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
    }


def _problems(key: str, parameters: dict[str, Any]) -> list[str]:
    problems = []
    for type_key in ("rope_type", "type"):
        kind = parameters.get(type_key, "default")
        if kind != "default":
            problems.append(
                f"{key}.{type_key} is {kind!r}; only 'default' rotary positions are supported, and "
                "without the scaling the model would answer differently"
            )
    factor = parameters.get("partial_rotary_factor", 1.0)
    if factor != 1.0:
        problems.append(
            f"{key}.partial_rotary_factor is {factor!r}; only 1.0 (the whole head) is supported"
        )
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if not problems:
        problems.extend(f"unknown key {key}.{name}" for name in sorted(set(parameters) - known))
    return problems
