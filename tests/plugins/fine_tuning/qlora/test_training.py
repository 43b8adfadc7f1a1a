"""Full runs: ten steps against transformers with PEFT on weights that bitsandbytes has quantised,
merged exports, resuming, and the base as the reference of a preference task."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ascend_run.core.checkpoint.store import FileStore
from ascend_run.entrypoints.cli import run as command_line
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import assert_the_same_in_two_halves, whole_run
from tests.plugins.fine_tuning.lora.against_peft import assert_gradients_are_of_peft, of_peft
from tests.plugins.fine_tuning.lora.lora_jobs import base_values, run_once
from tests.plugins.fine_tuning.lora.merged_models import merged_by_peft
from tests.plugins.fine_tuning.lora.peft_models import (
    ALPHA,
    RANK,
    peft_model,
    random_batch,
    read_peft,
    write_peft,
)
from tests.plugins.fine_tuning.lora.peft_runs import (
    new_values,
    refusal_of,
    train_with_peft,
    write_conversations,
)
from tests.support.loaded_model import largest_difference
from tests.support.preference_files import assert_equal_steps, write_models_and_pairs
from tests.support.task_runs import BATCH, STEPS, run_values
from tests.support.tiny_llama import write_llama

from .qlora_jobs import loaded_values, values_by_peer

BLOCK = 32
"""A row of most weights, so that rows have the same scales in whichever order they stand."""
BLOCKS = {"plugins__qlora__blocksize": BLOCK, "plugins__qlora__use_double_quant": False}
ENABLE = ("lora", "qlora")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a base, the same as bitsandbytes quantises it, an adapter, and conversations."""
    folder = tmp_path_factory.mktemp("qlora")
    base = Path(write_llama(folder / "model"))
    shutil.copytree(base, folder / "dequantised")
    tensors = {
        name: values_by_peer(tensor, BLOCK, compressed=False) if "_proj" in name else tensor
        for name, tensor in load_file(base / "model.safetensors").items()
    }
    save_file(tensors, folder / "dequantised/model.safetensors", metadata={"format": "pt"})
    write_conversations(folder)
    write_peft(peft_model(base), folder / "adapter")
    return folder


def values(workplace: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return new_values(workplace, output, **{**BLOCKS, **changes})


def test_every_adapters_gradient_is_pefts_on_bitsandbytes_weights(
    gloo_pool: GlooPool, workplace: Path
) -> None:
    peer = read_peft(workplace / "dequantised", workplace / "adapter")
    batch = random_batch()
    wanted = of_peft(peer, batch)

    model, adapter = str(workplace / "model"), str(workplace / "adapter")
    run = base_values(model, adapter, **BLOCKS)
    (outcome,) = gloo_pool.run(run_once, 1, run, *batch, ENABLE, False, timeout=100)
    assert_gradients_are_of_peft(outcome, wanted)
    (plain,) = gloo_pool.run(run_once, 1, base_values(model, adapter), *batch)
    assert largest_difference(plain.logits_BSV, wanted.logits_BSV) > 1e-3, "quantisation counts"


def test_ten_losses_are_those_of_peft_on_bitsandbytes_weights(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    """And the merged export is the dequantised base with the trained adapter."""
    expected, _ = train_with_peft(workplace, "dequantised")
    run = values(
        workplace,
        tmp_path / "run",
        plugins__lora__load=str(workplace / "adapter"),
        checkpoint__save_interval=STEPS,
    )
    (ended,) = gloo_pool.run(whole_run, 1, run, ENABLE, timeout=100)
    losses = [line["loss"] for line in ended.readings]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert max(expected) - min(expected) > 0.1
    stored = {*FileStore(tmp_path / "run/checkpoints").manifest(STEPS).tensors}
    assert all(".adapter." in key for key in stored if key.startswith("model/"))

    want = merged_by_peft(str(workplace / "dequantised"), tmp_path / "run/adapter")
    out = tmp_path / "out"
    assert command_line(["convert", "--to", "hf", str(tmp_path / "run"), str(out)]) == 0
    got = load_file(out / "model.safetensors")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_merged_export_has_the_values_of_each_ranks_shard(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    """New adapters of two ranks, which no step changes, are zero."""
    run = values(
        workplace,
        tmp_path / "run",
        optimizer__lr=0.0,
        train__train_iters=1,
        checkpoint__save_interval=1,
        plugins__qlora__use_double_quant=True,
        plugins__qlora__blocksize=64,
        parallel__tensor_model_parallel_size=2,
    )
    gloo_pool.run(whole_run, 2, run, ENABLE, timeout=100)
    out = tmp_path / "out"
    assert command_line(["convert", "--to", "hf", str(tmp_path / "run"), str(out)]) == 0
    got = load_file(out / "model.safetensors")
    ranks = gloo_pool.run(loaded_values, 2, run, ENABLE, timeout=100)
    for layer in range(2):
        want = of_llama(ranks, layer)
        for name, tensor in want.items():
            assert torch.equal(got[f"model.layers.{layer}.{name}.weight"], tensor), name
    before = load_file(workplace / "model/model.safetensors")
    assert torch.equal(got["lm_head.weight"], before["lm_head.weight"])


def of_llama(ranks: list[Mapping[str, Tensor]], layer: int) -> dict[str, Tensor]:
    """Return transformers' weights of a layer from the shards of two ranks, which hold one
    key-value group each: two heads of eight of queries, one of keys and one of values."""
    at = f"decoder.layers.{layer}"
    qkv = [rank[f"{at}.self_attention.linear_qkv.weight"].split([16, 8, 8]) for rank in ranks]
    fc1 = [rank[f"{at}.mlp.linear_fc1.weight"].chunk(2) for rank in ranks]
    found = {
        f"self_attn.{name}_proj": torch.cat([parts[index] for parts in qkv])
        for index, name in enumerate("qkv")
    }
    found |= {
        f"mlp.{name}_proj": torch.cat([parts[index] for parts in fc1])
        for index, name in enumerate(("gate", "up"))
    }
    for name, linear in (
        ("self_attn.o_proj", "self_attention.linear_proj"),
        ("mlp.down_proj", "mlp.linear_fc2"),
    ):
        found[name] = torch.cat([rank[f"{at}.{linear}.weight"] for rank in ranks], dim=1)
    return found


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path, precision: str
) -> None:
    def run(name: str, **changes: Any) -> Any:
        options = values(
            workplace,
            tmp_path / name,
            train__precision=precision,
            plugins__lora__dropout=0.2,
            plugins__sft__shuffle=True,
            plugins__qlora__use_double_quant=True,
            parallel__tensor_model_parallel_size=2,
            parallel__sequence_parallel=True,
            **changes,
        )
        return gloo_pool.run(whole_run, 2, options, ENABLE, timeout=100)

    assert_the_same_in_two_halves(run, 6, 3)


def test_adapters_do_not_go_on_beside_a_base_of_other_blocks(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    run = values(workplace, tmp_path, train__train_iters=1, checkpoint__save_interval=1)
    gloo_pool.run(whole_run, 1, run, ENABLE, timeout=100)
    again = {**run, "train.train_iters": 2, "plugins.qlora.blocksize": 64}
    (message,) = gloo_pool.run(refusal_of, 1, again, ENABLE, timeout=100)
    assert "plugins.qlora.blocksize=64, but the base of the checkpoint's adapters had 32" in message


@pytest.mark.needs_plugins("dpo")
def test_the_base_is_the_reference_as_a_second_model_is(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """A second model is quantised too, and has the same bits."""
    models = write_models_and_pairs(tmp_path / "files", 3 * BATCH)

    def run(name: str, **more: Any) -> Any:
        options = {
            "data__seq_length": 128,
            "train__train_iters": 3,
            "train__log_interval": 1,
            "plugins__dpo__shuffle": False,
            "plugins__lora__rank": RANK,
            "plugins__lora__alpha": float(ALPHA),
            **BLOCKS,
            **more,
        }
        values = run_values("dpo", models, tmp_path / name, **options)
        return gloo_pool.run(whole_run, 1, values, ENABLE, timeout=100)[0]

    second, base = run("second"), run("base", **{"plugins.dpo.reference": "base"})
    assert_equal_steps(base.readings, second.readings)
    assert base.readings[0]["rewards/margins"] == 0.0
    assert base.readings[-1]["rewards/margins"] != 0.0
