"""Steps beside a quantised base against steps beside a base with bitsandbytes' values, bit for bit,
in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ascend_run.testing.models import MODELS
from ascend_run.testing.pool import GlooPool
from ascend_run.types.layout import axis_settings, world_size
from tests.plugins.fine_tuning.adapter_plans import RECOMPUTED
from tests.support.latent_models import MODEL as LATENT
from tests.support.loaded_model import largest_difference
from tests.support.needed_plugins import names_of

from .qlora_jobs import Steps, computed, initial_shards, packed_by_peer, train

OPTIONS = {
    "plugins.lora.rank": 4,
    "plugins.lora.alpha": 6.0,
    "train.precision": "fp32",
    "plugins.cpu.fp32_matmul_library": "torch",  # not by timing, which may choose another one
}


def config_of(model: str, layout: Mapping[str, int], changes: Mapping[str, Any]) -> dict[str, Any]:
    sequence = bool(layout.get("sp", layout.get("tp", 1) > 1))
    return {
        **{**MODELS, "latent": LATENT}[model],
        **OPTIONS,
        **axis_settings(layout),
        "parallel.sequence_parallel": sequence,
        **changes,
    }


def assert_same_bits(got: Steps, want: Steps) -> None:
    assert got.losses == want.losses
    for ours, theirs in zip(got.gradients, want.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert got.trained.keys() == want.trained.keys()
    assert all(torch.equal(got.trained[name], want.trained[name]) for name in want.trained)


ADAPTED_EXPERTS = {"plugins.lora.target_modules": ["all-linear", "experts"]}
VIRTUAL = {
    "model.num_layers": 4,
    "parallel.virtual_pipeline_model_parallel_size": 2,
    "train.global_batch_size": 4,
}
MERGED = {"train.precision": "bf16", "plugins.cc-lora.merge": True}
CASES: dict[str, tuple[str, dict[str, int], tuple[str, ...], dict[str, Any]]] = {
    "one": ("dense", {}, (), {}),
    "bf16": ("dense", {}, (), {"train.precision": "bf16"}),
    "single quantisation": ("dense", {}, (), {"plugins.qlora.use_double_quant": False}),
    "blocks of 32": ("dense", {}, (), {"plugins.qlora.blocksize": 32}),
    "recompute": ("dense", {}, (), RECOMPUTED),
    "tp=2 sp dp=2 distributed optimizer": (
        "dense",
        {"tp": 2, "dp": 2},
        (),
        {"ddp.use_distributed_optimizer": True},
    ),
    "tp=2 sp recompute": ("dense", {"tp": 2}, (), RECOMPUTED),
    "tp=2 mc2": ("dense", {"tp": 2}, ("mc2",), {}),
    "tp=2 coc": ("dense", {"tp": 2}, ("coc",), {}),
    "tp=2 cc-lora": ("dense", {"tp": 2}, ("cc-lora",), {}),
    "tp=2 cc-lora merged bf16": ("dense", {"tp": 2}, ("cc-lora",), MERGED),
    "fused-mlp bf16": ("dense", {}, ("fused-mlp",), {"train.precision": "bf16"}),
    "tp=2 fused-mlp cc-lora recompute": (
        "dense",
        {"tp": 2},
        ("fused-mlp", "cc-lora"),
        RECOMPUTED,
    ),
    "pp=2": ("dense", {"pp": 2}, (), {}),
    "pp=2 in chunks": ("dense", {"pp": 2}, (), VIRTUAL),
    "cp=2 tp=2 ulysses": ("dense", {"cp": 2, "tp": 2}, ("ulysses",), {}),
    "cp=2 ring": ("dense", {"cp": 2}, ("ring-attention",), {}),
    "latent attention tp=2": ("latent", {"tp": 2}, (), {}),
    "experts gmm ep=2 tp=2": ("moe", {"tp": 2, "dp": 2, "ep": 2}, ("gmm",), {}),
    "adapted experts": ("moe", {}, (), ADAPTED_EXPERTS),
    "adapted experts bf16": ("moe", {}, (), {**ADAPTED_EXPERTS, "train.precision": "bf16"}),
    "adapted experts beside a dense layer": (
        "moe",
        {},
        (),
        {**ADAPTED_EXPERTS, "model.moe_layer_freq": [0, 1]},
    ),
    "adapted experts gmm ep=2 tp=2": (
        "moe",
        {"tp": 2, "dp": 2, "ep": 2},
        ("gmm",),
        ADAPTED_EXPERTS,
    ),
    "adapted experts moe-zero-memory ep=2": (
        "moe",
        {"dp": 2, "ep": 2},
        ("moe-zero-memory",),
        ADAPTED_EXPERTS,
    ),
}


@pytest.mark.exhaustive(
    by=lambda case: [bool(CASES[case][1]), *CASES[case][1], case[:7] == "adapted"]
)
@pytest.mark.parametrize("case", names_of(CASES, lambda case: case[2]))
def test_steps_equal_those_beside_bitsandbytes_values(gloo_pool: GlooPool, case: str) -> None:
    model, layout, beside, changes = CASES[case]
    config, ranks = config_of(model, layout, changes), world_size(layout)
    plain = {name: v for name, v in config.items() if not name.startswith("plugins.qlora")}
    block = config.get("plugins.qlora.blocksize", 64)
    peers = (block, config.get("plugins.qlora.use_double_quant", True))
    steps = 10 if case == "one" else 3
    quantised = gloo_pool.run(train, ranks, config, ("lora", "qlora", *beside), steps, timeout=100)
    want = gloo_pool.run(train, ranks, plain, ("lora", *beside), steps, peers, timeout=100)
    for got, expected in zip(quantised, want, strict=True):
        assert_same_bits(got, expected)
        assert got.packed
        assert not any("experts" in name for name in got.packed), "they keep the run's dtype"
        assert not expected.packed
        adapted = sum(".experts.adapter." in name for name in got.trained)
        assert bool(adapted) == case.startswith("adapted experts")
    assert quantised[0].losses[0] != quantised[0].losses[-1], "they train"


@pytest.mark.parametrize("compressed", [True, False])
def test_each_rank_stores_what_bitsandbytes_makes_of_its_shard(
    gloo_pool: GlooPool, compressed: bool
) -> None:
    """Codes, scales, scales of scales and their offset, of the shards of two ranks."""
    plain = config_of("dense", {"tp": 2}, {})
    config = {**plain, "plugins.qlora.use_double_quant": compressed}
    stored = gloo_pool.run(train, 2, config, ("lora", "qlora"), 0, timeout=100)
    bare = {name: value for name, value in plain.items() if not name.startswith("plugins.")}
    for rank, weights in zip(stored, gloo_pool.run(initial_shards, 2, bare), strict=True):
        held = {f"decoder.layers.{n}.{at}.weight" for n in range(2) for at in (
            "self_attention.linear_qkv", "self_attention.linear_proj",
            "mlp.linear_fc1", "mlp.linear_fc2")}  # fmt: skip
        assert {*rank.packed} == held
        for name, packed in rank.packed.items():
            want = packed_by_peer(weights[name], 64, compressed)
            assert packed.keys() == want.keys()
            for part, tensor in want.items():
                assert torch.equal(packed[part], tensor), (name, part)
                assert packed[part].dtype is tensor.dtype


def test_a_compute_dtype_is_that_of_bitsandbytes_linear(gloo_pool: GlooPool) -> None:
    """Input, weight and product in bfloat16, the result in float32; within one rounding, as its
    matmul adds in another order."""
    changes = {"model.ffn_hidden_size": 64, "plugins.qlora.compute_dtype": "bfloat16"}
    config = config_of("dense", {}, changes)
    plain = {name: value for name, value in config.items() if not name.startswith("plugins.")}
    (weights,) = gloo_pool.run(initial_shards, 1, plain)
    weight = weights["decoder.layers.0.mlp.linear_fc2.weight"]
    (results,) = gloo_pool.run(computed, 1, config, ("lora", "qlora"), weight)
    for ours, theirs in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-5)
        assert ours.dtype is torch.float32
        assert torch.equal(ours, ours.bfloat16().float())
    without = {**config, "plugins.qlora.compute_dtype": None}
    (results,) = gloo_pool.run(computed, 1, without, ("lora", "qlora"), weight)
    assert not torch.equal(results[0], results[0].bfloat16().float())


@pytest.mark.needs_plugins("cc-lora", "fused-mlp")
def test_fused_linears_compute_in_the_compute_dtype_too(gloo_pool: GlooPool) -> None:
    """As near to the linears apart as bfloat16 is, and another result than in the run's float32."""
    wide = config_of("dense", {"tp": 2}, {})
    narrow = {**wide, "plugins.qlora.compute_dtype": "bfloat16"}
    fused = ("lora", "qlora", "cc-lora", "fused-mlp")
    apart, ours, plain = (
        gloo_pool.run(train, 2, config, names, 3, timeout=100)[0]
        for config, names in ((narrow, fused[:2]), (narrow, fused), (wide, fused))
    )
    assert ours.losses == pytest.approx(apart.losses, rel=1e-3)
    assert ours.losses != plain.losses
    for name, gradient in apart.gradients[-1].items():
        assert largest_difference(ours.gradients[-1][name], gradient) < 0.05, name
