"""The three spellings of RoPE in config.json. Torch-free.

transformers 5 writes ``rope_parameters: {"rope_theta": ..., "rope_type": "default"}``; earlier
versions write ``rope_theta`` and ``rope_scaling``, whose type key is ``type`` or ``rope_type``.
Both hold the parameters of a scaling, which are the options ``model.rope_scaling_...``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from ascend_run.core.config.rotary_keys import (
    MSCALES,
    NAMES,
    PARAMETERS,
    PREFIX,
    REQUIRED,
    SCALINGS,
)
from ascend_run.types.config import RunConfig

from .latent_rope import latent_parameters
from .layer_rope import flatten_rope_parameters

_SCALING_KEYS: Final = ("rope_parameters", "rope_scaling")
_TYPE_KEYS: Final = ("rope_type", "type")
_DEFAULT: Final = "default"
_SHARE: Final = "partial_rotary_factor"
_FORMER: Final = {"su": "longrope"}
"""Maps a former name of a scaling to its own."""
_TYPE: Final = "model.rope_scaling_type"


def take_rope(
    config_json: dict[str, object],
    scaling: dict[str, object],
    *,
    partial: bool = False,
    more: Collection[str] = (),
) -> list[str]:
    """Replace all spellings by one ``rope_theta`` in place, if any contains it.

    Args:
        scaling: Filled with the scaling options, ``model.rope_scaling_...``.
        partial: Whether the family has a ``partial_rotary_factor``, which is then a key, too.
        more: Parameters of a scaling that the family's class reads and few others do.

    Returns:
        Problems: an unknown or incomplete scaling, partial rotation, two different bases or
            scalings.
    """
    problems = list(flatten_rope_parameters(config_json))
    thetas = {"rope_theta": config_json.pop("rope_theta")} if "rope_theta" in config_json else {}
    scalings = {}
    for key in _SCALING_KEYS:
        parameters = config_json.pop(key, None)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            problems.append(f"{key} is {parameters!r}; expected an object or null")
            continue
        if partial and _SHARE in parameters:
            share = parameters[_SHARE]
            parameters = {name: value for name, value in parameters.items() if name != _SHARE}
            if config_json.setdefault(_SHARE, share) != share:
                problems.append(f"{key}.{_SHARE} is {share!r} and {_SHARE} another; leave one")
        found: dict[str, Any] = {}
        problems += (wrong := list(_problems(key, parameters, found, more)))
        if not wrong:
            scalings[key] = found
        if "rope_theta" in parameters:
            thetas[f"{key}.rope_theta"] = parameters["rope_theta"]
    bases = {repr(float(v)) if isinstance(v, int | float) else repr(v) for v in thetas.values()}
    if len(bases) > 1:
        seen = ", ".join(f"{name} = {value!r}" for name, value in thetas.items())
        problems.append(f"two different rotary bases: {seen}; leave one")
    elif thetas:
        config_json["rope_theta"] = next(iter(thetas.values()))
    if len(scalings) > 1 and scalings["rope_parameters"] != scalings["rope_scaling"]:
        problems.append("rope_parameters and rope_scaling scale positions differently; leave one")
    for found in scalings.values():
        scaling |= found
    return problems


def rope_keys(theta: float, config: RunConfig) -> dict[str, object]:
    """Return the new and the old spelling, the latter for older readers."""
    model = config.model
    latent = latent_parameters(config)
    share = {} if model.rotary_percent == 1.0 else {_SHARE: model.rotary_percent}
    kind = "yarn" if latent else model.rope_scaling_type
    if kind is None:
        return {
            "rope_theta": theta,
            "rope_parameters": {"rope_theta": theta, "rope_type": _DEFAULT, **share},
        }
    given = latent or {name.removeprefix(PREFIX): model[name] for name in NAMES[1:]}
    parameters = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given.items()
        if value is not None
    }
    written = {"rope_theta": theta, "rope_type": kind, **share, **parameters}
    return {"rope_theta": theta, "rope_parameters": written, "rope_scaling": written}


def _problems(
    key: str, parameters: dict[str, Any], found: dict[str, Any], more: Collection[str]
) -> list[str]:
    kinds = {
        name: _FORMER.get(str(parameters[name]), parameters[name])
        for name in _TYPE_KEYS
        if name in parameters
    }
    problems = [
        f"{key}.{name} is {kind!r}; only {_DEFAULT!r} and {', '.join(map(repr, SCALINGS))} rotary "
        "positions are supported, and without the scaling the model would compute something else"
        for name, kind in kinds.items()
        if kind not in (_DEFAULT, *SCALINGS)
    ]
    if len({*map(repr, kinds.values())}) > 1:
        problems.append(f"{key} has two types: {kinds!r}; leave one")
    share = parameters.get(_SHARE, 1.0)
    if share != 1.0:
        problems.append(f"{key}.{_SHARE} is {share!r}; only 1.0 (the whole head) is supported")
    if problems:
        return problems
    kind = next(iter(kinds.values()), _DEFAULT)
    known = {"rope_theta", _SHARE, *_TYPE_KEYS}
    rest = {name: value for name, value in parameters.items() if name not in known}
    reads = [n for n in PARAMETERS.get(kind, ()) if n not in MSCALES or n in more]
    problems += [f"unknown key {key}.{name}" for name in sorted(set(rest) - set(reads))]
    problems += [
        f"{key}.{name} is {value!r}; expected {expected}"
        for name, value in rest.items()
        if name in reads and value is not None and (expected := _expectation(name, value))
    ]
    problems += [
        f"{key}.{name} is missing; {kind} positions need it"
        for name in REQUIRED.get(kind, ())
        if rest.get(name) is None
    ]
    if not problems and kind != _DEFAULT:
        found[_TYPE] = kind
        found |= {
            f"model.{PREFIX}{name}": _as_ours(name, value)
            for name, value in rest.items()
            if value is not None
        }
    return problems


def _expectation(name: str, value: object) -> str | None:
    """Return the expected value of a parameter; None if the value is valid."""
    if name == "truncate":
        return None if isinstance(value, bool) else "true or false"
    if name == "original_max_position_embeddings":
        sound = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if sound else "a whole number above 0"
    if name in ("short_factor", "long_factor"):
        sound = isinstance(value, list) and bool(value) and all(map(_is_positive, value))
        return None if sound else "a list of numbers above 0"
    return None if _is_positive(value) else "a number above 0"


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= 1e30


def _as_ours(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(float(factor) for factor in value)
    return value if name in ("truncate", "original_max_position_embeddings") else float(value)
