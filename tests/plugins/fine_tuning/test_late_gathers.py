"""Adapters whose parameters are gathered only when their module is needed."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.plugins.fine_tuning.adapter_trials import Trials, assert_parity

LATE: Final = "ddp.overlap_param_gather"
SMALL: Final = {"ddp.bucket_size": 4000}
"""A few parameters in each bucket; default: all in one."""
CASES: Final[dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "lora": ((), SMALL),
    "lora, magnitudes": ((), {**SMALL, "plugins.lora.dora": True, "plugins.lora.load": None}),
    "cc-lora": (("cc-lora",), {}),
    "fused-mlp": (("fused-mlp",), {"ddp.bucket_size": 500}),
}


@pytest.mark.exhaustive(by=lambda case: [CASES[case][0]])
@pytest.mark.parametrize("case", CASES)
def test_weights_gathered_late_are_those_gathered_at_once(trials: Trials, case: str) -> None:
    beside, values = CASES[case]
    config = {
        "ddp.use_distributed_optimizer": True,
        "ddp.overlap_grad_reduce": True,
        "optimizer.lr": 0.05,
        **values,
    }
    at_once, late = (
        trials("dense", {"tp": 2, "dp": 2}, beside, 3, {**config, LATE: is_late})
        for is_late in (False, True)
    )
    assert_parity(late, at_once, 1e-6)
