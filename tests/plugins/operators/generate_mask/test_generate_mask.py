"""Cached masks: how many exist, for any number of layers, with equal results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from ascend_run.ops.attention.blockwise_attention import band
from ascend_run.ops.attention.shared_bands import SharedBands
from ascend_run.ops.attention.visibility import SHARED_BANDS, rectangles
from ascend_run.plugin_api import AscendRunError, AttentionSpec, Mask, RunConfig
from ascend_run.plugins.operators.generate_mask import GenerateMask, GenerateMaskConfig
from ascend_run.plugins.platforms.cpu.operators import platform_ops as cpu_ops
from ascend_run.plugins.platforms.cuda.platform_ops import platform_ops as cuda_ops
from ascend_run.plugins.platforms.npu.platform_ops import platform_ops as npu_ops
from ascend_run.prepare.prepare import prepare as plan
from ascend_run.testing.models import DENSE
from ascend_run.testing.parity import Parity
from tests.support.attention_problems import PROBLEMS, check
from tests.support.costs import planned
from tests.support.probed_runs import built
from tests.support.tiny_configs import model_fields, parallel_fields

WINDOW = {"model.window_size": [4, 0]}
RUN = ["model.family=llama", "data.train=x", "model.num_layers=2", "model.hidden_size=32",
       "model.num_attention_heads=4", "model.ffn_hidden_size=48", "model.vocab_size=64",
       "data.seq_length=16"]  # fmt: skip


def shared(platform: str, ops: Any, **options: str) -> dict[str, Any]:
    config = RunConfig(model=model_fields(), parallel=parallel_fields(), platform=platform)
    plugin = GenerateMask(GenerateMaskConfig(**options))
    kernels = plugin.ascend_fused_operators(config=config)(ops).attention_kernels
    return {name: build() for name, build in kernels.items()}


def test_one_band_serves_all_that_are_alike() -> None:
    bands = SharedBands()
    like = torch.empty(0, dtype=torch.float64)
    parts = rectangles(Mask(window=(300, 0)), 256 * 12, 256 * 12)
    for part in parts:
        assert torch.equal(bands.of(part, like), band(part, like))
    assert len(parts) == 12
    assert len(bands.tensors) == 3, "the first two are cut off by the beginning"
    for window in ((7, 0), (3, 0)):  # of equal size
        for part in rectangles(Mask(window=window), 20, 20):
            assert torch.equal(bands.of(part, like), band(part, like))


def test_no_more_bands_are_held_than_a_few() -> None:
    bands = SharedBands()
    for length in range(2, 3 * SHARED_BANDS):
        for part in rectangles(Mask(window=(1, 0)), length, length):
            bands.of(part, torch.empty(0))
    assert len(bands.tensors) == SHARED_BANDS


def test_all_layers_and_kernels_of_the_cpu_share_them(tmp_path: Path) -> None:
    values = {**WINDOW, "enable": ["generate-mask"], "model.num_layers": 4}
    with built(tmp_path, values=values) as (_, context):
        layers = context.models["policy"].chunks[0].module.decoder.layers
        kernels = [layer.self_attention.core_attention.kernel for layer in layers]
    assert len({id(kernel._fused._band.__self__) for kernel in kernels}) == 1
    first = kernels[0]._fused._band.__self__
    q = torch.randn(16, 1, 8, 4)
    spec_mask = layers[0].self_attention.core_attention.mask
    for kernel in kernels:
        for part in rectangles(spec_mask, 16, 16):
            kernel._fused._band(part, q)
    assert len(first.tensors) == 1


@pytest.mark.parametrize("name", ["left-window", "both-windows", "documents-and-window"])
def test_shared_bands_give_the_formula(name: str) -> None:
    for kernel in shared("cpu", cpu_ops()).values():
        check(kernel, PROBLEMS[name])


def test_on_the_npu_it_chooses_the_form() -> None:
    assert all(kernel.masks.compressed for kernel in shared("npu", npu_ops()).values())
    whole = shared("npu", npu_ops(), form="whole")
    assert not any(kernel.masks.compressed for kernel in whole.values())
    assert {*whole} == {"v1", "v2", "blocks"}


def test_on_cuda_all_kernels_share_one() -> None:
    kernels = shared("cuda", cuda_ops()).values()
    assert len({id(kernel._rectangles._band.__self__) for kernel in kernels}) == 1


def test_a_plan_counts_what_is_held() -> None:
    length, window = 900, (300, 0)
    values = {**DENSE, "data.seq_length": length, "model.window_size": [*window]}
    _, (cost,) = planned(values, ("generate-mask",))
    q, spec = torch.randn(length, 1, 1, 4), AttentionSpec(scale=0.5, mask=Mask(window=window))
    kernel = shared("cpu", cpu_ops())["fused"]
    for _ in range(2):
        kernel.forward(q, q, q, spec)
    held = sum(tensor.nbytes for tensor in kernel._fused._band.__self__.tensors)
    assert cost.changes["generate-mask"].buffers == {"attention masks": held}

    masks = shared("npu", npu_ops(), form="whole")["v1"].masks
    for part in rectangles(spec.mask, length, length, band_block=None):
        masks.of(part, q.device)
    config = attrs.evolve(planned(values)[0].config, platform="npu")
    plugin = GenerateMask(GenerateMaskConfig(form="whole"))
    change = plugin.ascend_cost(config=config, rank=cost.rank)
    assert change is not None
    assert change.buffers == {"attention masks": sum(t.nbytes for t in masks.tensors)}


@pytest.mark.exhaustive(by=lambda layout: [bool(layout)])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_every_bit_stays(parity: Parity, layout: dict[str, int]) -> None:
    parity("generate-mask", layout=layout, config=WINDOW)


@pytest.mark.needs_plugins("flash-attention")
def test_it_goes_with_a_chosen_kernel(parity: Parity) -> None:
    parity(("flash-attention", "generate-mask"), config=WINDOW)


def test_what_a_platform_does_not_have_is_refused_when_planned() -> None:
    words = [*RUN, "plugins.generate-mask.form=whole"]
    with pytest.raises(AscendRunError, match="form=whole: no kernel of platform cpu"):
        plan(None, words, platform="cpu", enable=["generate-mask"])
    plan(None, words, platform="npu", enable=["generate-mask"])
