"""Ten steps against trl's trainer of conversations: tokens, losses and gradient norms."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import whole_run
from tests.support.task_runs import BATCH, STEPS
from tests.support.tiny_llama import adamw

from .test_training import values, write_workplace


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workplace(tmp_path_factory.mktemp("sft"))


def steps_of_trl(workplace: Path, output: Path, **options: Any) -> list[dict[str, float]]:
    """Return loss and gradient norm of each step on one pass over the file, in its order."""
    # Imported here since it takes seconds, also where no test of this module is chosen.
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    records = map(json.loads, (workplace / "train.jsonl").read_text().splitlines())
    model = LlamaForCausalLM.from_pretrained(workplace / "model")
    optimizer = adamw([*model.parameters()])
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    # transformers and accelerate set environment variables, and warn of all sorts.
    with mock.patch.dict(os.environ), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mock.patch("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True):
            trainer = SFTTrainer(
                model=model,
                args=SFTConfig(
                    output_dir=str(output),
                    num_train_epochs=1,
                    per_device_train_batch_size=BATCH,
                    train_sampling_strategy="sequential",
                    max_grad_norm=1.0,
                    bf16=False,
                    use_cpu=True,
                    gradient_checkpointing=False,
                    logging_steps=1,
                    save_strategy="no",
                    report_to="none",
                    disable_tqdm=True,
                    **options,
                ),
                train_dataset=Dataset.from_list([*records]),
                processing_class=AutoTokenizer.from_pretrained(workplace / "blocks"),
                optimizers=(optimizer, constant),
            )
            trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.exhaustive(by=lambda trained: [])
@pytest.mark.parametrize("trained", ["the assistant's turns", "everything"])
def test_ten_steps_are_those_of_trl(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path, trained: str
) -> None:
    is_whole = trained == "everything"
    run = values(workplace, tmp_path / "run", plugins__sft__train_on_inputs=is_whole)
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    ours = [(line["loss"], line["grad_norm"]) for line in ended.readings if "loss" in line]
    theirs = steps_of_trl(workplace, tmp_path / "trl", assistant_only_loss=not is_whole)
    assert len(ours) == STEPS
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx((other["loss"], other["grad_norm"]), rel=1e-5)
