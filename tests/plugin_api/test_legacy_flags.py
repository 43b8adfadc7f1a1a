from __future__ import annotations

import pytest

from ascend_run.plugin_api.legacy_flags import ANY, LegacyFlag


def test_a_flag_alone_enables_its_plugin() -> None:
    record = LegacyFlag(flag="--use-it")
    assert (record.key, record.values) == ("enable", {"": True})
    assert str(record) == "--use-it"


def test_the_words_that_enable_stand_behind_the_flag() -> None:
    record = LegacyFlag(flag="--algo", values={"ring": True, "none": False, ANY: False})
    assert str(record) == "--algo ring"
    assert str(LegacyFlag(flag="--size", key="model.size", values={"a": 1})) == "--size"


@pytest.mark.parametrize("flag", ["use-it", "--algo ring", ""])
def test_a_flag_of_another_shape_is_refused(flag: str) -> None:
    with pytest.raises(ValueError, match="must be one word"):
        LegacyFlag(flag=flag)


def test_a_sum_beside_a_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match="plus needs values=None"):
        LegacyFlag(flag="--interval", key="model.every", plus=1)
