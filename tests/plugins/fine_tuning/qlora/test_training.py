"""Full runs: ten steps against transformers with PEFT on weights that bitsandbytes has quantised,
merged exports, resuming, and the base as the reference of a preference task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from ascend_run.core.checkpoint.store import FileStore
from ascend_run.entrypoints.cli import run as command_line
from ascend_run.plugin_api import AscendRunError
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import assert_same, whole_run
from tests.plugins.fine_tuning.lora.lora_jobs import base_values, hf_names, run_once
from tests.plugins.fine_tuning.lora.peft_models import (
    ALPHA,
    RANK,
    peft_model,
    read_peft,
    trained,
    write_peft,
)
from tests.plugins.fine_tuning.lora.test_convert import merged_by_peft
from tests.plugins.fine_tuning.lora.test_training import conversations
from tests.support.chats import CHATML, GENERATION, write_lines, write_tokenizer
from tests.support.loaded_model import largest_difference
from tests.support.preference_files import assert_equal_steps, write_models_and_pairs
from tests.support.tiny_llama import OPTIMIZER, train_reference, write_llama

from .qlora_jobs import loaded_values, values_by_peer

STEPS, BATCH = 10, 4
BLOCK = 32
"""A row of most weights, so that rows have the same scales in whichever order they stand."""
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
    write_tokenizer(folder / "tokenizer", CHATML)
    write_tokenizer(folder / "blocks", GENERATION)
    write_lines(folder / "train.jsonl", conversations(STEPS * BATCH))
    write_peft(peft_model(base), folder / "adapter")
    return folder


def values(workplace: Path, output: Path, **changes: Any) -> Mapping[str, Any]:
    return {
        **OPTIMIZER,
        "task": "sft",
        "run.output_dir": str(output),
        "model.family": "llama",
        "model.hf_path": str(workplace / "model"),
        "model.make_vocab_size_divisible_by": 8,
        "data.train": [str(workplace / "train.jsonl")],
        "data.tokenizer": str(workplace / "tokenizer"),
        "data.seq_length": 64,
        "train.train_iters": STEPS,
        "train.global_batch_size": BATCH,
        "train.precision": "fp32",
        "plugins.sft.shuffle": False,
        "plugins.lora.rank": RANK,
        "plugins.lora.alpha": float(ALPHA),
        "plugins.qlora.blocksize": BLOCK,
        "plugins.qlora.use_double_quant": False,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


def test_every_adapters_gradient_is_pefts_on_bitsandbytes_weights(
    gloo_pool: GlooPool, workplace: Path
) -> None:
    rows = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    peer = read_peft(workplace / "dequantised", workplace / "adapter")
    logits = peer(input_ids=tokens).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    expected = {name: p.grad for name, p in trained(peer).items()}

    model, adapter = str(workplace / "model"), str(workplace / "adapter")
    run = {
        **base_values(model, adapter),
        "plugins.qlora.blocksize": BLOCK,
        "plugins.qlora.use_double_quant": False,
    }
    (outcome,) = gloo_pool.run(run_once, 1, run, tokens, labels, ENABLE, False, timeout=100)
    gradients = hf_names(outcome.gradients)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert largest_difference(gradient, expected[name]) < 1e-5, name
    (plain,) = gloo_pool.run(run_once, 1, base_values(model, adapter), tokens, labels)
    assert largest_difference(plain.logits_BSV, logits.detach()) > 1e-3, "quantisation counts"


def test_ten_losses_are_those_of_peft_on_bitsandbytes_weights(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    """And the merged export is the dequantised base with the trained adapter."""
    tokenizer = AutoTokenizer.from_pretrained(workplace / "blocks")
    samples = []
    for line in (workplace / "train.jsonl").read_text().splitlines():
        question, result = json.loads(line)["conversations"]
        encoded = tokenizer.apply_chat_template(
            [
                {"role": "user", "content": question["value"]},
                {"role": "assistant", "content": result["value"]},
            ],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        samples.append((encoded["input_ids"], [bool(x) for x in encoded["assistant_masks"]]))
    batches = [samples[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]
    dequantised = workplace / "dequantised"
    expected = list(train_reference(read_peft(dequantised, workplace / "adapter"), batches))
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

    want = merged_by_peft(str(dequantised), tmp_path / "run/adapter")
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

    straight = run("straight", train__train_iters=6)
    run("halves", train__train_iters=3, checkpoint__save_interval=3)
    halves = run("halves", train__train_iters=6, checkpoint__save_interval=3)
    assert_same(halves, straight)
    assert halves[0].readings == straight[0].readings


def refusal_of(run: Mapping[str, Any]) -> str:
    """Return the error of a run: a job that raises it would end the pool's ranks."""
    try:
        whole_run(run, ENABLE)
    except AscendRunError as error:
        return str(error)
    return "no error"


def test_adapters_do_not_go_on_beside_a_base_of_other_blocks(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    run = values(workplace, tmp_path, train__train_iters=1, checkpoint__save_interval=1)
    gloo_pool.run(whole_run, 1, run, ENABLE, timeout=100)
    again = {**run, "train.train_iters": 2, "plugins.qlora.blocksize": 64}
    (message,) = gloo_pool.run(refusal_of, 1, again, timeout=100)
    assert "plugins.qlora.blocksize=64, but the base of the checkpoint's adapters had 32" in message


@pytest.mark.needs_plugins("dpo")
def test_the_base_is_the_reference_as_a_second_model_is(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """A second model is quantised too, and has the same bits."""
    models = write_models_and_pairs(tmp_path / "files", 3 * BATCH)

    def run(name: str, **more: Any) -> Any:
        options = {
            **values(models, tmp_path / name),
            "task": "dpo",
            "data.seq_length": 128,
            "train.train_iters": 3,
            "train.log_interval": 1,
            "plugins.dpo.shuffle": False,
            **more,
        }
        options.pop("plugins.sft.shuffle")
        return gloo_pool.run(whole_run, 1, options, ENABLE, timeout=100)[0]

    second, base = run("second"), run("base", **{"plugins.dpo.reference": "base"})
    assert_equal_steps(base.readings, second.readings)
    assert base.readings[0]["rewards/margins"] == 0.0
    assert base.readings[-1]["rewards/margins"] != 0.0
