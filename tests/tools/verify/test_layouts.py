"""Words for layouts."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api import ConfigError
from ascend_run.tools.verify.layouts import parse_layout, shown, with_dp
from ascend_run.types.layout import world_size


def test_a_layout_is_read_and_shown() -> None:
    sizes = parse_layout("tp=2, cp=2,sp")
    assert sizes == {"tp": 2, "cp": 2, "sp": 1}
    assert world_size(sizes) == 4
    assert shown(sizes) == "tp=2,cp=2,sp"
    assert shown({"dp": 1}) == "one rank"


@pytest.mark.parametrize(
    ("word", "ranks"), [("ep=2", 2), ("tp=2,ep=2", 2), ("tp=2,ep=4", 4), ("tp=2,ep=2,dp=2", 4)]
)
def test_there_are_as_many_ranks_as_the_experts_need(word: str, ranks: int) -> None:
    assert world_size(with_dp(parse_layout(word))) == ranks


def test_all_that_is_no_layout_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse_layout("tp=2,tq=2,pp=0,tp=4,sp=2")
    assert len(error.value.problems) == 4
