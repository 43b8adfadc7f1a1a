"""Head shares: every head is assigned, and no rank gets a head that it does not need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.ops.attention.head_shares import head_shares, parts


@given(total=st.integers(0, 200), size=st.integers(1, 16))
def test_parts_follow_one_another_and_the_first_have_one_more(total: int, size: int) -> None:
    ranges = parts(total, size)
    assert [place for part in ranges for place in range(*part)] == [*range(total)]
    numbers = [stop - start for start, stop in ranges]
    assert numbers == sorted(numbers, reverse=True)
    assert max(numbers) - min(numbers) <= 1


@given(groups=st.integers(1, 12), each=st.integers(1, 8), size=st.integers(1, 16))
def test_every_query_head_meets_its_own_key_value_head(groups: int, each: int, size: int) -> None:
    heads = groups * each
    if heads < size:
        with pytest.raises(ValueError, match=f"{heads} query heads"):
            head_shares(heads, groups, size)
        return
    given_out = []
    for share in head_shares(heads, groups, size):
        given_out += range(*share.queries)
        numbers = zip(range(*share.groups), share.copies, strict=True)
        copied = [group for group, copies in numbers for _ in range(copies)]
        assert share.num_queries % len(copied) == 0
        met = [group for group in copied for _ in range(share.num_queries // len(copied))]
        assert met == [head // each for head in range(*share.queries)]
    assert given_out == [*range(heads)]


@pytest.mark.parametrize(("heads", "groups", "size"), [(8, 2, 4), (8, 8, 4), (32, 4, 2)])
def test_where_everything_divides_no_head_is_copied(heads: int, groups: int, size: int) -> None:
    for share in head_shares(heads, groups, size):
        assert {*share.copies} == {1}
        assert share.num_groups == max(1, groups // size)
