"""The kit's runtime is a run like any other: the kernel alone is at parity with itself in every
layout, which is what comparisons of plugins stand on."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.testing.kit import KitRuntime
from ascend_run.testing.offering import offered
from ascend_run.testing.parity import Parity
from tests.testing import planted


@pytest.mark.exhaustive(by=lambda model, layout: layout if model == "moe" else [])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", {"dp": 2}),
        ("dense", {"tp": 2}),
        ("dense", {"tp": 2, "dp": 2}),
        ("moe", {"dp": 2}),
        ("moe", {"dp": 4}),
        ("moe", {"dp": 2, "ep": 2}),
        ("moe", {"dp": 4, "ep": 2}),
        ("moe", {"dp": 4, "ep": 4}),
        ("moe", {"tp": 2}),
        ("moe", {"tp": 2, "dp": 2}),
        ("moe", {"tp": 2, "ep": 2}),
        ("moe", {"tp": 2, "dp": 2, "ep": 2}),
        ("moe", {"tp": 2, "dp": 2, "ep": 4}),
    ],
    ids=str,
)
def test_without_plugins_every_layout_computes_what_one_rank_computes(
    parity: Parity, model: str, layout: dict[str, int]
) -> None:
    parity([], model=model, layout=layout)


def test_the_numerics_of_a_plugin_are_those_of_its_manifest() -> None:
    with offered(planted.RoundsOnce, planted.ScalesAGradient):
        runtime = KitRuntime()
        assert runtime.numerics_of("rounds-once") is Numerics.BITWISE
        assert runtime.numerics_of("scales-a-gradient") is Numerics.ROUNDING


def test_a_plugin_that_is_no_longer_offered_is_unknown() -> None:
    with offered(planted.RoundsOnce):
        pass
    with pytest.raises(AscendRunError, match="rounds-once"):
        KitRuntime().numerics_of("rounds-once")
