"""Whole runs with adapters on conversations, and the same ten steps by PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from ascend_run.plugin_api import AscendRunError
from tests.core.train.runs import whole_run
from tests.support.chats import CHATML, GENERATION, with_mask, write_lines, write_tokenizer
from tests.support.task_runs import BATCH, STEPS, batches_of, run_values
from tests.support.tiny_llama import train_reference

from .peft_models import ALPHA, RANK, read_peft, trained

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "hello", "fox")


def conversations(count: int) -> list[dict[str, Any]]:
    made = []
    for index in range(count):
        said = [WORDS[(index * 3 + k) % len(WORDS)] for k in range(1 + index % 6)]
        made.append(
            {"conversations": [
                {"from": "human", "value": " ".join(said) + "?"},
                {"from": "gpt", "value": " ".join(reversed(said)) + "."},
            ]}
        )  # fmt: skip
    return made


def write_conversations(folder: Path) -> None:
    """Write the tokenizer and ``train.jsonl``, beside a model."""
    write_tokenizer(folder / "tokenizer", CHATML)
    write_tokenizer(folder / "blocks", GENERATION)
    write_lines(folder / "train.jsonl", conversations(STEPS * BATCH))


def new_values(folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Return config values of ten steps on the conversations of a folder, from new adapters."""
    of_adapters = {
        "data__seq_length": 64,
        "plugins__sft__shuffle": False,
        "plugins__lora__rank": RANK,
        "plugins__lora__alpha": float(ALPHA),
    }
    return run_values("sft", folder, output, **{**of_adapters, **changes})


def values(folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Return the same from the adapter in the folder."""
    load = {"plugins__lora__load": str(folder / "adapter")}
    return new_values(folder, output, **{**load, **changes})


def train_with_peft(folder: Path, base: str = "model") -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of PEFT's model on the conversations of a folder, and what it has trained.

    Args:
        base: Name of the base's folder in it.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder / "blocks")
    samples = []
    for line in (folder / "train.jsonl").read_text().splitlines():
        question, result = json.loads(line)["conversations"]
        messages = [
            {"role": "user", "content": question["value"]},
            {"role": "assistant", "content": result["value"]},
        ]
        samples.append(with_mask(tokenizer, messages))
    model = read_peft(folder / base, folder / "adapter")
    losses = list(train_reference(model, batches_of(samples)))
    return losses, {name: p.detach().clone() for name, p in trained(model).items()}


def assert_trained_adapter(
    exported: Path, initial: Path, weights: Mapping[str, Tensor], *, has_copies: bool = False
) -> None:
    """Compare an exported adapter with what PEFT has trained, and check that each tensor moved.

    Args:
        has_copies: Whether PEFT's files have tensors that are no parameters of their own.
    """
    found, before = (load_file(f / "adapter_model.safetensors") for f in (exported, initial))
    assert found.keys() == before.keys()
    assert has_copies or found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)
        assert not torch.equal(found[name], before[name]), f"{name} has not moved"


def refusal_of(run: Mapping[str, Any], enable: Sequence[str] = ("lora",)) -> str:
    """Return the error of a run: a job that raises it would end the pool's ranks."""
    try:
        whole_run(run, enable)
    except AscendRunError as error:
        return str(error)
    return "no error"
