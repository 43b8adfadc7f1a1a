"""Errors raised before a run starts."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import AscendRunError
from ascend_run.testing.models import DENSE
from tests.support.small_runs import prepare

BOTH = ("lora", "qlora")


@pytest.mark.parametrize(
    ("enable", "changes", "message"),
    [
        (("qlora",), {}, "'qlora' requires 'lora'"),
        (BOTH, {"plugins.lora.checkpoint": "full"}, "use plugins.lora.checkpoint=adapters"),
        (BOTH, {"plugins.lora.dora": True}, "qlora: plugins.lora.dora=true takes norms"),
        (BOTH, {"plugins.qlora.blocksize": 48}, "plugins.qlora.blocksize"),
        (BOTH, {"plugins.qlora.compute_dtype": "float8"}, "plugins.qlora.compute_dtype"),
    ],
    ids=[
        "no adapter",
        "full checkpoints",
        "norms",
        "blocks",
        "dtype",
    ],
)
def test_a_run_that_cannot_be_is_refused(
    enable: tuple[str, ...], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(AscendRunError) as refusal:
        prepare({**DENSE, "train.precision": "bf16", **changes}, enable)
    assert message in str(refusal.value)
    assert len(refusal.value.problems) <= 1, "one problem, or a headline that says it all"
