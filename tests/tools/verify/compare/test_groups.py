"""Weight decay and learning rates of the parameters, compared by name."""

from __future__ import annotations

import math

import pytest

from ascend_run.tools.verify.compare.groups import compare_groups, groups_of

from .made_up import records

RATES = {"a.b.weight": [0.1, 0.0, 5e-4, 1e-3], "c.bias": [0.0, 0.0, 5e-4, 1e-3]}


def test_equal_groups_pass_and_ranks_are_merged() -> None:
    mine = records(2, rates={})
    mine[0].rates, mine[1].rates = {"a.b.weight": RATES["a.b.weight"]}, RATES
    check, wrong = compare_groups(mine, records(rates=RATES), "the oracle")
    assert check.passed
    assert not wrong


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ({"c.bias": [0.1, 0.0, 5e-4, 1e-3]}, "c.bias has weight decay 0.1, expected 0"),
        (
            {"c.bias": [0.0, 0.0, 1e-3, 2e-3]},
            "c.bias has learning rate 0.001 in step 2, expected 0.0005",
        ),
        ({"d.weight": [0.0, 0.0, 5e-4, 1e-3]}, "d.weight is in a group of the optimizer, but"),
        ({"c.bias": [math.nan] * 4}, "c.bias has other rates on other ranks"),
    ],
    ids=str,
)
def test_a_wrong_group_names_the_parameter(rates: dict[str, list[float]], says: str) -> None:
    check, wrong = compare_groups(records(rates=RATES | rates), records(rates=RATES), "the oracle")
    assert not check.passed
    assert [*wrong] == [*rates]
    assert check.details[0].startswith(says)


def test_a_parameter_without_a_group_is_named() -> None:
    mine = records(rates={"a.b.weight": RATES["a.b.weight"]})
    check, _ = compare_groups(mine, records(rates=RATES), "the oracle")
    assert check.details == ("c.bias is in no group of the optimizer",)


def test_groups_are_shown_by_decay_and_multiplier() -> None:
    mine = records(rates={**RATES, "e.weight": [0.1, 0.0, 1e-3, 2e-3]})
    shown = [(g.weight_decay, g.lr_multiplier, g.parameters) for g in groups_of(mine, 1e-3)]
    assert shown == [
        (0.0, 1.0, ("c.bias",)),
        (0.1, 1.0, ("a.b.weight",)),
        (0.1, 2.0, ("e.weight",)),
    ]
