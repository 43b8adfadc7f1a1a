"""Calls and bytes of every token dispatcher in a step, in every kind of layout of the experts,
against those that the kit counts on four ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import pytest

from ascend_run.testing.models import MOE, trial_layout
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import load_runtime
from benchmarks.campaigns.features import features
from tests.support.communication import differences

_LONGER: Final = {"data.seq_length": 64, "model.num_moe_experts": 16}
_HALF: Final = {"train.precision": "bf16"}
_GATHER: Final = {"model.moe_token_dispatcher_type": "allgather"}
_DROPS: Final = {"model.moe_expert_capacity_factor": 0.5}
_PADS: Final = {
    "model.moe_expert_capacity_factor": 1.5,
    "model.moe_pad_expert_input_to_capacity": True,
}
_TWO_REPLICAS: Final = {"plugins.hot-experts.num_experts": 2}
_OF_REPLICAS: Final = ("broadcast", "reduce")
"""``plan`` expects as many replicas as there may be; with equal loads there are none."""


@attrs.frozen
class _Dispatcher:
    """Plugins that dispatch tokens, and the settings of a run with them."""

    plugins: tuple[str, ...] = ()
    values: Mapping[str, Any] = attrs.field(factory=dict)
    ignored: tuple[str, ...] = ()
    """Operations that are not compared."""


LAYOUTS: Final[Mapping[str, Mapping[str, int]]] = {
    "-".join(f"{axis}{size}" for axis, size in sizes.items()): sizes
    for sizes in (
        {"ep": 2},
        {"ep": 4},
        {"expt_tp": 2},
        {"expt_tp": 4},
        {"ep": 2, "expt_tp": 2},
        {"tp": 2, "ep": 2},
        {"tp": 2, "ep": 4},
        {"tp": 2, "expt_tp": 2},
        {"tp": 2, "expt_tp": 4},
        {"tp": 2, "ep": 2, "expt_tp": 2},
        {"tp": 4, "ep": 2},
        {"tp": 4, "ep": 4},
        {"tp": 4, "expt_tp": 2},
        {"tp": 4, "expt_tp": 4},
        {"tp": 4, "ep": 2, "expt_tp": 2},
        {"pp": 2, "ep": 2},
        {"pp": 2, "tp": 2, "expt_tp": 2},
    )
}
"""Without tensor parallelism, with as many ranks as share the experts, and with fewer or more."""
DISPATCHERS: Final[Mapping[str, _Dispatcher]] = {
    "all-to-all": _Dispatcher(),
    "all-to-all, bf16": _Dispatcher(values=_HALF),
    "all-to-all, dropped": _Dispatcher(values=_DROPS),
    "all-to-all, padded": _Dispatcher(values=_PADS),
    "all-gather": _Dispatcher(values=_GATHER),
    "all-gather, bf16": _Dispatcher(values={**_GATHER, **_HALF}),
    "all-gather, dropped": _Dispatcher(values={**_GATHER, **_DROPS}),
    "all-gather, padded": _Dispatcher(values={**_GATHER, **_PADS}),
    "moe-permute-fusion": _Dispatcher(("moe-permute-fusion",)),
    "moe-alltoall": _Dispatcher(("moe-alltoall",)),
    "moe-alltoall, padded": _Dispatcher(("moe-alltoall",), _PADS),
    "moe-alltoall, chunks": _Dispatcher(
        ("moe-alltoall",), {"plugins.moe-alltoall.overlap_chunks": 3}
    ),
    "moe-alltoall, dropped, chunks, bf16": _Dispatcher(
        ("moe-alltoall",), {"plugins.moe-alltoall.overlap_chunks": 4, **_DROPS, **_HALF}
    ),
    "moe-allgather": _Dispatcher(("moe-allgather",), _GATHER),
    "moe-allgather, dropped, chunks, bf16": _Dispatcher(
        ("moe-allgather",),
        {"plugins.moe-allgather.overlap_chunks": 3, **_GATHER, **_DROPS, **_HALF},
    ),
    "moe-bmm-fused": _Dispatcher(("moe-bmm-fused",), _PADS),
    "moe-bmm-fused, bf16": _Dispatcher(("moe-bmm-fused",), {**_PADS, **_HALF}),
    "hot-experts": _Dispatcher(("hot-experts",), _TWO_REPLICAS, _OF_REPLICAS),
    "hot-experts, moe-alltoall": _Dispatcher(
        ("hot-experts", "moe-alltoall"), _TWO_REPLICAS, _OF_REPLICAS
    ),
}


def _cases() -> list[Any]:
    """The dispatchers in the layouts that they accept."""
    return [
        pytest.param(
            name, layout, marks=pytest.mark.needs_plugins(*made.plugins), id=f"{name}, {layout}"
        )
        for name, made in DISPATCHERS.items()
        for layout, sizes in LAYOUTS.items()
        if "hot-experts" not in made.plugins or "expt_tp" not in sizes
    ]


@pytest.mark.exhaustive(by=lambda dispatcher: [dispatcher])
@pytest.mark.parametrize(("dispatcher", "layout"), _cases())
def test_a_dispatcher_sends_what_was_expected(
    gloo_pool: GlooPool, dispatcher: str, layout: str
) -> None:
    made, split = DISPATCHERS[dispatcher], trial_layout(LAYOUTS[layout])
    config = {**MOE, **_LONGER, **split, **made.values}
    assert differences(gloo_pool, config, made.plugins, ignored=made.ignored) == []


def test_every_dispatcher_is_compared() -> None:
    runtime = load_runtime()
    ours = {n for n in features() if "ascend_token_dispatcher" in runtime.describe(n).hooks}
    assert ours
    assert ours <= {name for made in DISPATCHERS.values() for name in made.plugins}
