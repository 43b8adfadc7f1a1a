"""Kernel selection: every name of every platform builds one, and the run's results are
unchanged."""

from __future__ import annotations

import os
from typing import get_args

import attrs
import pytest

from ascend_run.plugin_api import AscendRunError, ConfigError, PlatformOps, RunConfig
from ascend_run.plugins.operators.flash_attention import (
    KERNELS,
    FlashAttention,
    FlashAttentionConfig,
)
from ascend_run.plugins.platforms.cpu.operators import platform_ops as cpu_ops
from ascend_run.plugins.platforms.cuda.platform_ops import platform_ops as cuda_ops
from ascend_run.plugins.platforms.npu import operators
from ascend_run.plugins.platforms.npu.platform_ops import platform_ops as npu_ops
from ascend_run.prepare.prepare import prepare
from ascend_run.testing.parity import Parity
from ascend_run.testing.runtime import PLATFORM_VARIABLE
from tests.support.tiny_configs import model_fields, parallel_fields

OPS = {"cpu": cpu_ops(), "cuda": cuda_ops(), "npu": npu_ops()}
RUN = ["model.family=llama", "data.train=x", "model.num_layers=2", "model.hidden_size=32",
       "model.num_attention_heads=4", "model.ffn_hidden_size=48", "model.vocab_size=64",
       "data.seq_length=16"]  # fmt: skip
FUSED = "_scaled_dot_product_flash_attention_for_cpu"


def config_of(platform: str) -> RunConfig:
    return RunConfig(model=model_fields(), parallel=parallel_fields(), platform=platform)


def chosen(platform: str, **options: str) -> object:
    plugin = FlashAttention(FlashAttentionConfig(**options))
    return plugin.ascend_attention_kernel(config=config_of(platform), ops=OPS[platform])


def test_the_names_are_those_of_the_platforms_own_tables() -> None:
    assert {name: (*ops.attention_kernels,) for name, ops in OPS.items()} == KERNELS


@pytest.mark.parametrize("platform", OPS)
def test_auto_is_the_platforms_own_choice(platform: str) -> None:
    kernel = chosen(platform)
    assert not kernel.in_blocks
    assert (
        vars(kernel).keys() == vars(next(iter(OPS[platform].attention_kernels.values()))()).keys()
    )


def test_a_name_and_a_layout_reach_the_kernel() -> None:
    kernel = chosen("npu", kernel="v2", layout="BNSD")
    assert (kernel.version, kernel.layout) == (2, "BNSD")
    layouts = attrs.fields(attrs.resolve_types(FlashAttentionConfig)).layout.type
    assert get_args(layouts) == ("auto", *operators.LAYOUTS)
    assert chosen("cpu", kernel="blocks").in_blocks
    assert chosen("cuda", kernel="blocks").in_blocks


def test_all_layers_have_one_kernel() -> None:
    plugin = FlashAttention(FlashAttentionConfig())
    asked = {"config": config_of("npu"), "ops": OPS["npu"]}
    assert plugin.ascend_attention_kernel(**asked) is plugin.ascend_attention_kernel(**asked)


@pytest.mark.parametrize(
    ("platform", "option", "message"),
    [
        ("cpu", "kernel=v2", "kernel=v2: platform cpu has fused, blocks; choose one"),
        ("npu", "kernel=flash", "kernel=flash: platform npu has v1, v2, blocks"),
        ("cuda", "layout=BSND", "layout=BSND is for the NPU's operator"),
    ],
)
def test_what_a_platform_does_not_have_is_refused_when_planned(
    platform: str, option: str, message: str
) -> None:
    words = [*RUN, f"plugins.flash-attention.{option}"]
    with pytest.raises(AscendRunError, match=message):
        prepare(None, words, platform=platform, enable=["flash-attention"])


def test_a_third_party_platform_lists_its_kernels() -> None:
    bare = PlatformOps(rms_norm=None, layer_norm=None, swiglu=None, rotary=None)
    plugin = FlashAttention(FlashAttentionConfig())
    with pytest.raises(ConfigError, match="platform theirs names no attention kernels"):
        plugin.ascend_attention_kernel(config=config_of("theirs"), ops=bare)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("kernel", ["auto", "blocks"])
def test_the_run_stays_what_it_was_whichever_kernel_computes(
    parity: Parity, kernel: str, model: str
) -> None:
    options = {"plugins.flash-attention.kernel": kernel}
    (outcome,) = parity("flash-attention", model=model, options=options)
    # A GPU's fused kernels have no float64; there auto computes in blocks as well.
    on_cpu = os.environ.get(PLATFORM_VARIABLE, "cpu") == "cpu"
    assert bool(outcome.operations.get(FUSED)) == (kernel == "auto" and on_cpu)


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_it_goes_with_every_way_to_cut_a_model(parity: Parity, layout: dict[str, int]) -> None:
    parity("flash-attention", layout=layout, options={"plugins.flash-attention.kernel": "blocks"})


@pytest.mark.needs_plugins("ulysses")
def test_it_computes_inside_a_sequence_exchange(parity: Parity) -> None:
    options = {"plugins.flash-attention.kernel": "blocks"}
    for outcome in parity(
        "flash-attention", beside=("ulysses",), layout={"cp": 2}, options=options
    ):
        assert FUSED not in outcome.operations
