"""Which features are compared beside a task, in which layouts, and how.

A feature that leaves a step as it is, is compared with the run without it, to the bit if it
declares so. A feature that makes another model, and a model family, are compared on packed rows
with the same records in rows of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import attrs
import pytest

from ascend_run.plugin_api import Numerics
from benchmarks.campaigns import resume, verify_clean_newer
from benchmarks.campaigns.features import EXCHANGE, config_of, features, needs_exchange, numerics_of
from benchmarks.campaigns.tiny_runs import VALUES

from .feature_steps import LAYOUTS, Ran, Run, Steps
from .tiny_families import FAMILIES, model_values
from .unequal_records import LENGTH

SAME: Final[Mapping[Numerics, float]] = {Numerics.BITWISE: 0.0, Numerics.ROUNDING: 1e-4}
"""How a feature may change a step, relative."""
SLOW: Final = "compile"
"""It makes code for each of these runs, in minutes; its own suite compares it with plain layers."""
COMPARED: Final = [name for name in features() if numerics_of(name) in SAME and name != SLOW]
CHANGING: Final = [name for name in features() if numerics_of(name) not in SAME]
COVERING: Final = ("tp=2, ep=2", "vpp=2", "cp=2")
"""Layouts of which each feature acts in one at least."""
_AXIS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            *("adaptive-cp", "double-ring", "hybrid-adaptive-cp", "hybrid-cp", "kv-allgather-cp"),
            *("ring-attention", "ulysses", "unaligned-ulysses"),
        ),
        "cp",
    ),
    **dict.fromkeys(
        (
            *("gmm", "hot-experts", "moe-adaptive-recompute", "moe-allgather", "moe-alltoall"),
            *("moe-bmm-fused", "moe-permute-fusion", "moe-tp-extend-ep", "moe-zero-memory"),
            "shared-experts",
        ),
        "ep",
    ),
    **dict.fromkeys(("cc-lora", "coc", "mc2", "recompute-comm-opt"), "tp"),
    **dict.fromkeys(("recompute-in-advance", "recompute-in-bubble"), "pp"),
}
"""Feature -> the axis without which it has nothing to do; others act everywhere."""
_SHOWN: Final = "vpp=2"
"""The layout of a small sample."""
EXPERTS: Final = tuple(where for where, (model, _) in LAYOUTS.items() if model == "moe")
REFUSED: Final[Mapping[str, tuple[Collection[str], str]]] = {
    "eod-reset": (LAYOUTS.keys(), "both claim 'documents'"),
    "fused-mlp": (EXPERTS, "every layer has experts"),
    "moe-tp-extend-ep": (("ep=2", "cp=2, ep=2"), "is 1, not 2"),
    "recompute-activation": (EXPERTS, "of no layer of this model"),
}
"""Feature -> where planning refuses it, and the reason, which its own suite tests."""


def acts(name: str, where: str) -> bool:
    """Return whether a feature has something to do in a layout."""
    return _AXIS.get(name) in (None, *LAYOUTS[where][1])


def cases(names: Sequence[str], layouts: Mapping[bool, Sequence[str]]) -> list[Any]:
    """Return parameters: a feature, a layout in which it acts, and whether rows are packed.

    Args:
        layouts: Whether rows are packed -> the layouts.
    """
    found = []
    for packing, places in layouts.items():
        for where, name in itertools.product(places, names):
            if acts(name, where):
                id = f"{name}-{where}-{'packed' if packing else 'alone'}"
                found.append(pytest.param(name, where, packing, id=id, marks=_marks(where)))
    return found


def shown_case(name: str, where: str, packing: bool) -> list[str]:
    """Return what a case of a small sample shows; nothing, if it is not in it."""
    return [name] if packing and (name, where) == ("recompute", _SHOWN) else []


def shown_model(name: str, where: str) -> list[str]:
    """Return the same for a model, on packed rows that the other sample has run."""
    return [name] if (name, where) == (PLAIN, _SHOWN) else []


def _marks(where: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.needs_plugins(EXCHANGE)] if "cp" in LAYOUTS[where][1] else []


def assert_leaves_the_steps(steps: Steps, name: str, where: str, packing: bool) -> None:
    """Compare the steps with a feature with those without it."""
    ran = steps(run_with(name, where, packing))
    if assert_refused_for_its_reason(ran, name, where):
        return
    assert name not in ran.idle
    wanted = steps(run_with(name, where, packing, itself=False))
    assert not wanted.refused
    tolerance = SAME[numerics_of(name)]
    assert ran.values == pytest.approx(wanted.values, rel=tolerance, abs=0.0)
    if not tolerance:
        assert ran.weights == wanted.weights


def assert_refused_for_its_reason(ran: Ran, name: str, where: str) -> bool:
    """Return whether a run was refused; where it should be, for the reason that is known."""
    places, reason = REFUSED.get(name, ((), ""))
    if where not in places:
        assert not ran.refused
        return False
    assert reason in ran.refused
    return True


def run_with(name: str, where: str, packing: bool, *, itself: bool = True) -> Run:
    """Return the run with a feature, and with what it needs beside it.

    Args:
        itself: False: without the feature, in the model that it needs.
    """
    exchanges = "cp" in LAYOUTS[where][1] and (
        not itself or needs_exchange(name, LAYOUTS[where][1])
    )
    names = (
        name if itself else None,
        verify_clean_newer.BESIDE.get(name),
        EXCHANGE if exchanges else None,
    )
    needed = verify_clean_newer.NEEDS.get(name, {})
    values = {
        **config_of((name,)),
        **{k: v for k, v in needed.items() if k.startswith(("model.", "train."))},
        **resume.CONFIG.get(name, {}),
        "model.num_layers": 4,
    }
    enable = tuple(dict.fromkeys(filter(None, names)))
    return Run(enable=enable, where=where, packing=packing, values=values)


PLAIN: Final = "plain"
"""No feature."""
_VARIANTS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "dora": ("lora", {"plugins.lora.dora": True}),
}
"""Name -> a feature and its options."""


def models(layouts: Sequence[str]) -> list[Any]:
    """Return parameters: what makes another model, and a layout. That is nothing, a feature, or a
    family, which is run on one rank."""
    names = (PLAIN, *CHANGING, *_VARIANTS)
    found = [
        pytest.param(name, where, id=f"{name}-{where}", marks=_marks(where))
        for where, name in itertools.product(layouts, names)
        if acts(name, where)
    ]
    return found + [pytest.param(name, "one rank", id=name) for name in FAMILIES]


def assert_packed_is_alone(steps: Steps, name: str, where: str) -> None:
    """Compare the steps on packed rows with those on the same records in rows of their own."""
    packed = _model_run(name, where)
    ran = steps(packed)
    if assert_refused_for_its_reason(ran, name, where):
        return
    assert not ran.idle & {*packed.enable}
    alone = steps(attrs.evolve(packed, packing=False))
    assert ran.values == pytest.approx(alone.values, rel=SAME[Numerics.ROUNDING], abs=0.0)


def _model_run(name: str, where: str) -> Run:
    if name == PLAIN:
        return run_with(name, where, True, itself=False)
    if name in FAMILIES:
        return Run(packing=True, values=_family_values(name))
    feature, options = _VARIANTS.get(name, (name, {}))
    run = run_with(feature, where, True)
    return attrs.evolve(run, values={**run.values, **options})


def _family_values(family: str) -> dict[str, Any]:
    """Return a tiny model of a family that takes a row."""
    values = {
        "model.num_query_groups": None,
        **model_values(family),
        "model.vocab_size": VALUES["model.vocab_size"],
        "model.max_position_embeddings": LENGTH,
        # The bias balances all that is routed, padding too, of which packed rows have less.
        "model.moe_router_bias_update_rate": 0.0,
    }
    if values.get("model.log_n_scaling_length"):
        values["model.log_n_scaling_length"] = LENGTH
    return values
