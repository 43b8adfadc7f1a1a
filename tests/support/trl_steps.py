"""Preference optimization by trl's trainers: their tokens, batches, losses and metrics, in the loop
of transformers."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

import attrs
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, Trainer

from .plain_preferences import Answer, Pair
from .preference_files import tokenized
from .tiny_llama import adamw

CLOSING: Final = "<|im_end|>"
_UNTRAINED: Final = -100


@attrs.frozen(kw_only=True)
class TrlSteps:
    """Losses, gradient norms and metrics of AdamW steps on one pass over the training file.

    Args:
        models: Folder by ``write_models_and_pairs``.
        batch: Pairs of a step.
        trainer: ``dpo``, or ``cpo``, which has no reference.
        options: Of the trainer's config.
        reference: Folder of the reference's weights beside the policy's; default: the policy's.
        read: Returns the policy, with what is trained of it, of its folder.
        at_once: Pairs of a forward pass. With 1, losses which trl defines for a batch are means
            over pairs.
    """

    models: Path
    batch: int
    trainer: str = "dpo"
    options: Mapping[str, Any] = attrs.field(factory=dict)
    reference: str | None = None
    read: Callable[[Path], Any] = LlamaForCausalLM.from_pretrained
    at_once: int

    def run(self, output: Path) -> list[dict[str, float]]:
        """Return the readings of each step, named as in ``METRICS``."""
        # transformers and accelerate set environment variables, and warn of all sorts.
        with mock.patch.dict(os.environ), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with mock.patch("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True):
                trainer = self._trainer(output)
            self._check_tokens(trainer.train_dataset)
            trainer.train()
        steps = [line for line in trainer.state.log_history if "loss" in line]
        pairs = self._pairs()
        return [
            {**line, **_lengths(pairs[step * self.batch : (step + 1) * self.batch])}
            for step, line in enumerate(steps)
        ]

    def _trainer(self, output: Path) -> Trainer:
        # Imported here since it takes seconds, also where no test of this module is chosen.
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        made, config = {"dpo": (DPOTrainer, DPOConfig), "cpo": (CPOTrainer, CPOConfig)}[
            self.trainer
        ]
        model = self.read(self.models / "model")
        optimizer = adamw([*model.parameters()])
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        models = {"model": model}
        if self.reference is not None:
            models["ref_model"] = LlamaForCausalLM.from_pretrained(self.models / self.reference)
        return made(
            **models,
            args=config(
                output_dir=str(output),
                num_train_epochs=1,
                per_device_train_batch_size=self.at_once,
                gradient_accumulation_steps=self.batch // self.at_once,
                train_sampling_strategy="sequential",
                max_grad_norm=1.0,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                **self.options,
            ),
            train_dataset=Dataset.from_list(self._texts()),
            # trl adds what begins a text and what ends an answer.
            processing_class=AutoTokenizer.from_pretrained(
                self.models / "blocks", bos_token=None, eos_token=CLOSING
            ),
            optimizers=(optimizer, constant),
        )

    def _texts(self) -> list[dict[str, str]]:
        """Return the pairs with rendered prompts."""
        tokenizer = AutoTokenizer.from_pretrained(self.models / "blocks")
        records = map(json.loads, (self.models / "train.jsonl").read_text().splitlines())
        return [
            {
                "prompt": tokenizer.apply_chat_template(
                    [{"role": "user", "content": record["conversations"][0]["value"]}],
                    add_generation_prompt=True,
                    tokenize=False,
                ),
                "chosen": record["chosen"]["value"],
                "rejected": record["rejected"]["value"],
            }
            for record in records
        ]

    def _pairs(self) -> list[Pair]:
        return tokenized(self.models / "blocks", self.models / "train.jsonl")

    def _check_tokens(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Assert that trl trains on the tokens that other tests do."""
        found = [(_answer(row, "chosen"), _answer(row, "rejected")) for row in rows]
        wanted = [(_closed(chosen), _closed(rejected)) for chosen, rejected in self._pairs()]
        assert found == wanted


def _answer(row: Mapping[str, Any], side: str) -> Answer:
    """Return the tokens of a row that a trainer prepared: the two do so under different names."""
    if f"{side}_labels" in row:
        return row[f"{side}_input_ids"], [label != _UNTRAINED for label in row[f"{side}_labels"]]
    prompt, answer = row["prompt_ids"], row[f"{side}_ids"]
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def _closed(answer: Answer) -> Answer:
    """Return the tokens to the last one that is trained."""
    ids, trained = answer
    end = max(index for index, is_trained in enumerate(trained) if is_trained) + 1
    return ids[:end], trained[:end]


def _lengths(pairs: list[Pair]) -> dict[str, float]:
    return {
        f"lengths/{name}": sum(sum(pair[side][1]) for pair in pairs) / len(pairs)
        for side, name in enumerate(("chosen", "rejected"))
    }
