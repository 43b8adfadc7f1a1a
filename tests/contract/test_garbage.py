"""Collections of garbage in a session of tests search what its tests have made."""

from __future__ import annotations

import gc

import pytest


def test_what_there_was_before_the_tests_is_not_searched(request: pytest.FixtureRequest) -> None:
    made: list[list[object]] = [[]]
    made[0].append(made)
    searched = gc.get_objects()
    assert gc.isenabled()
    assert any(found is made for found in searched)
    assert not any(found is request.session.items for found in searched)
    assert not any(found is request.node for found in searched)
