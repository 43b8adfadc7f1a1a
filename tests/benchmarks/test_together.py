"""The campaign ``together``: the committed result is of every pair and layout, and it passes.

``tests/contract/test_together.py`` runs sets in which every feature is, and features alone in
layouts drawn from it.
"""

from __future__ import annotations

import pytest

from benchmarks.campaigns import together
from benchmarks.campaigns.campaign import PASSED, is_full, read_result

RESULT = read_result(together.CAMPAIGN.name)
FEATURES = RESULT["figures"]["features"]


@pytest.mark.needs_plugins(*FEATURES)
def test_the_committed_result_is_of_all_cases_and_passes() -> None:
    assert is_full(together.CAMPAIGN, RESULT)
    assert RESULT["counts"] == {PASSED: RESULT["cases"]}


def test_every_feature_was_compared_and_what_was_refused_says_why() -> None:
    figures = RESULT["figures"]
    assert figures["cases of each feature"].keys() == {*FEATURES}
    assert figures["compared"] + sum(figures["refused"].values()) == RESULT["cases"]
    assert all(figures["refused"])
