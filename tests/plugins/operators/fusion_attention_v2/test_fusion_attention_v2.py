"""The second version of the operator: which kernel is selected, and its arguments.

The tests of platform npu cover its arithmetic, together with the first version's.
"""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import HookError, Mask, PlatformOps, RunConfig
from ascend_run.plugins.operators.fusion_attention_v2 import FusionAttentionV2
from ascend_run.plugins.platforms.cpu.operators import platform_ops as cpu_ops
from ascend_run.plugins.platforms.npu import operators
from ascend_run.plugins.platforms.npu.platform_ops import platform_ops as npu_ops
from ascend_run.testing.parity import Parity
from tests.plugins.platforms.npu.reference import define_reference_operators
from tests.support.attention_problems import PROBLEMS, Problem, check
from tests.support.tiny_configs import model_fields, parallel_fields


def config_of(platform: str) -> RunConfig:
    return RunConfig(model=model_fields(), parallel=parallel_fields(), platform=platform)


def returned(platform: str, ops: PlatformOps) -> Any:
    return FusionAttentionV2().ascend_attention_kernel(config=config_of(platform), ops=ops)


def test_the_second_version_is_used_on_the_npu_only() -> None:
    """Other platforms use their own kernel."""
    assert returned("npu", npu_ops()).version == 2
    assert type(returned("cpu", cpu_ops())) is cpu_ops().attention_kernels["fused"]


def test_a_platform_without_kernels_is_reported() -> None:
    bare = PlatformOps(rms_norm=None, layer_norm=None, swiglu=None, rotary=None)
    with pytest.raises(HookError, match="platform theirs names no attention kernels"):
        returned("theirs", bare)


@pytest.mark.parametrize(
    ("name", "kind", "starts"),
    [
        ("bias", operators.AFTER_SCALE, (0, 0)),
        ("distances", operators.SLOPES, (0, 0)),
        ("roots-of-distances", operators.ROOT_SLOPES, (0, 0)),
        ("chunk", operators.SLOPES, (24, 12)),
    ],
)
def test_every_kind_of_bias_is_given_as_the_operator_documents_it(
    name: str, kind: int, starts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    define_reference_operators()
    seen: list[operators.Call] = []
    plain = operators.fusion_attention

    def watch(*given: Any) -> operators.AttentionOut:
        seen.append(given[-1])
        return plain(*given)

    monkeypatch.setattr(operators, "fusion_attention", watch)
    chunk = Problem(positions="distance", mask=Mask(query_start=24, key_start=12))
    check(returned("npu", npu_ops()), {**PROBLEMS, "chunk": chunk}[name])
    (call,) = seen
    assert (call.version, call.bias.kind) == (2, kind)
    assert (call.bias.query_start, call.bias.key_start) == starts


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=str)
def test_where_there_is_no_npu_the_run_stays_what_it_was(
    parity: Parity, layout: dict[str, int]
) -> None:
    parity("fusion-attention-v2", layout=layout)
