"""Full runs: ten steps against transformers with PEFT, which weights change and which do not,
PEFT's files, and resuming from checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ascend_run.core.checkpoint.store import FileStore
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import Ended, assert_the_same_in_two_halves, whole_run
from tests.support.tiny_llama import write_llama

from .peft_models import ALPHA, RANK, peft_model, read_peft, trained, write_peft
from .peft_runs import (
    assert_trained_adapter,
    refusal_of,
    train_with_peft,
    values,
    write_conversations,
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a base model, its tokenizer, conversations and an initial adapter."""
    folder = tmp_path_factory.mktemp("lora")
    base = write_llama(folder / "model")
    write_conversations(folder)
    write_peft(peft_model(base), folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def reference(workplace: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses of PEFT's model on the same conversations, and its trained adapters."""
    return train_with_peft(workplace)


SP = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"train__micro_batch_size": 2}),
    "tp=2": (2, {"parallel__tensor_model_parallel_size": 2}),
    "tp=2 sp dp=2": (4, SP),
    "pp=2": (2, {"parallel__pipeline_model_parallel_size": 2}),
}


@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][0] > 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_losses_and_the_exported_adapter_are_those_of_peft(
    gloo_pool: GlooPool,
    workplace: Path,
    reference: tuple[list[float], dict[str, torch.Tensor]],
    tmp_path: Path,
    layout: str,
) -> None:
    ranks, changes = LAYOUTS[layout]
    run = values(workplace, tmp_path, **changes)
    ended = gloo_pool.run(whole_run, ranks, run, ("lora",), timeout=100)
    losses = [line["loss"] for line in ended[0].readings]
    expected, weights = reference
    assert losses == pytest.approx(expected, rel=1e-5)
    assert max(expected) - min(expected) > 0.1

    assert_trained_adapter(tmp_path / "adapter", workplace / "adapter", weights)


def test_peft_reads_what_is_exported_bit_for_bit(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    """No step changes weights: the output equals the input, through the layout of two ranks."""
    run = values(workplace, tmp_path, optimizer__lr=0.0, train__train_iters=1, **SP)
    gloo_pool.run(whole_run, 2, run, ("lora",), timeout=100)
    stored = load_file(workplace / "adapter/adapter_model.safetensors")
    exported = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    model = read_peft(workplace / "model", tmp_path / "adapter")
    assert model.peft_config["default"].r == RANK
    assert model.peft_config["default"].lora_alpha == ALPHA
    held = trained(model)
    assert held.keys() == stored.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in stored.items())


def stored_keys(folder: Path, step: int) -> set[str]:
    return {*FileStore(folder / "checkpoints").manifest(step).tensors}


def test_the_base_keeps_its_bits_and_the_optimizer_holds_adapters_only(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    run = values(workplace, tmp_path, plugins__lora__checkpoint="full", checkpoint__save_interval=5)
    (ended,) = gloo_pool.run(whole_run, 1, run, ("lora",), timeout=100)
    assert isinstance(ended, Ended)
    weights = {n: t for n, t in ended.tensors.items() if n.startswith("model/")}
    states = {n for n in ended.tensors if n.startswith("optimizer/")}
    assert states
    assert all(".adapter." in name for name in states)
    base = load_file(workplace / "model/model.safetensors")
    plain = [tensor.flatten() for name, tensor in weights.items() if ".adapter." not in name]
    # The same values in fused layout, bitwise equal.
    ours, theirs = (
        torch.cat(tensors).sort().values
        for tensors in (plain, [tensor.flatten() for tensor in base.values()])
    )
    assert torch.equal(ours, theirs)
    assert any("word_embeddings" in key for key in stored_keys(tmp_path, 10))


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize(
    ("what", "precision"), [("adapters", "fp32"), ("full", "fp32"), ("adapters", "bf16")]
)
def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path, what: str, precision: str
) -> None:
    def run(name: str, **changes: Any) -> Any:
        options = values(
            workplace,
            tmp_path / name,
            plugins__lora__checkpoint=what,
            train__precision=precision,
            plugins__lora__dropout=0.2,
            plugins__sft__shuffle=True,
            **SP,
            **changes,
        )
        return gloo_pool.run(whole_run, 2, options, ("lora",), timeout=100)

    assert_the_same_in_two_halves(run, 6, 3)
    kept = {key for key in stored_keys(tmp_path / "halves", 6) if key.startswith("model/")}
    assert all(".adapter." in key for key in kept) == (what == "adapters")
    assert (tmp_path / "halves/adapter/adapter_model.safetensors").is_file()


def test_adapters_do_not_go_on_beside_another_base(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    run = values(workplace, tmp_path / "run", train__train_iters=1, checkpoint__save_interval=1)
    gloo_pool.run(whole_run, 1, run, ("lora",), timeout=100)
    other = write_llama(tmp_path / "other", seed=9)
    # The adapter to load names its base too, and would be refused first.
    again = {**run, "plugins.lora.load": None, "train.train_iters": 2, "model.hf_path": other}
    (message,) = gloo_pool.run(refusal_of, 1, again, timeout=100)
    assert "the base model differs from that of the checkpoint" in message
    again = {**run, "plugins.lora.alpha": 7.0, "plugins.lora.load": None, "train.train_iters": 2}
    (message,) = gloo_pool.run(refusal_of, 1, again, timeout=100)
    assert "alpha=7.0, but the checkpoint's adapters have 6.0" in message
