"""The plugin's declarations, refusals and cost."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import Claim, ConfigError, Numerics, Phase
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.reuse_fp32_param import ReuseFp32Param, ReuseFp32ParamConfig
from ascend_run.testing.models import DENSE
from tests.support.costs import planned

NAME = ("reuse-fp32-param",)
BF16 = {**DENSE, "train.precision": "bf16"}
DISTRIBUTED = {"ddp.use_distributed_optimizer": True}


def test_it_owns_the_parameters_storage_and_changes_no_bit() -> None:
    assert claims_of(ReuseFp32Param) == (Claim.PARAMETER_STORAGE,)
    assert ReuseFp32Param.manifest.numerics is Numerics.BITWISE


def test_a_bucket_has_elements() -> None:
    with pytest.raises(ValueError, match="bucket_size"):
        ReuseFp32ParamConfig(bucket_size=0)


def test_fp16_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        planned({**DENSE, "train.precision": "fp16"}, NAME)
    assert "train.precision=fp16 has other exponents than float32" in str(caught.value)


def test_without_master_weights_it_is_idle() -> None:
    prepared, (cost,) = planned(DENSE, NAME)
    assert {*prepared.idle} == {*NAME}
    assert NAME[0] not in cost.changes
    assert {*planned(BF16, NAME)[0].idle} == set()


@pytest.mark.parametrize("bucket_size", [1, 3000, 10**6])
@pytest.mark.parametrize("more", [{}, DISTRIBUTED], ids=["replicated", "distributed"])
def test_a_step_adds_the_float32_of_the_largest_bucket(
    more: dict[str, Any], bucket_size: int
) -> None:
    options = {"plugins.reuse-fp32-param.bucket_size": bucket_size}
    _, (cost,) = planned({**BF16, **more, **options}, NAME, 2)
    (working,) = cost.changes[NAME[0]].working
    numels = [p.numel for p in cost.rank.parameters]
    largest = max(bucket_size, max(numels))
    elements = min(largest, sum(numels) / 2 if more else sum(numels))
    # With an int32 for each element of the parameter that is converted.
    assert working.nbytes == 4 * elements + 4 * min(elements, max(numels))
    assert working.phase is Phase.UPDATE
