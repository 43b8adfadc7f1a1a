"""Reward models by trl's trainer: its batches, loss and metrics, in the loop of transformers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

import attrs
import torch
from transformers import AutoTokenizer, Trainer

from .plain_rewards import closed, scorer
from .preference_files import tokenized
from .tiny_llama import adamw

METRICS: Final = {"margin": "rewards/margins", "accuracy": "rewards/accuracies"}
"""Name in trl's log -> in ours."""


@attrs.frozen(kw_only=True)
class TrlRewards:
    """Losses, gradient norms and metrics of AdamW steps on one pass over the training file.

    Args:
        models: Folder with pairs, and the folder ``model-scorer``.
        batch: Pairs of a step, in one forward pass.
        options: Of trl's config.
        margin: Of every pair.
    """

    models: Path
    batch: int
    options: Mapping[str, Any] = attrs.field(factory=dict)
    margin: float | None = None

    def run(self, output: Path) -> list[dict[str, float]]:
        """Return the readings of each step, named as in ``REWARDS`` where there is such."""
        # transformers and accelerate set environment variables, and warn of all sorts.
        with mock.patch.dict(os.environ), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with mock.patch("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True):
                trainer = self._trainer(output)
            trainer.train()
        return [
            {METRICS.get(name, name): value for name, value in line.items()}
            for line in trainer.state.log_history
            if "loss" in line
        ]

    def _trainer(self, output: Path) -> Trainer:
        # Imported here since it takes seconds, also where no test of this module is chosen.
        from datasets import Dataset
        from trl import RewardConfig, RewardTrainer

        model = scorer(self.models / "model-scorer")
        optimizer = adamw([*model.parameters()])
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        margin = {} if self.margin is None else {"margin": self.margin}
        pairs = tokenized(self.models / "blocks", self.models / "train.jsonl")
        return RewardTrainer(
            model=model,
            args=RewardConfig(
                output_dir=str(output),
                num_train_epochs=1,
                per_device_train_batch_size=self.batch,
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
            train_dataset=Dataset.from_list(
                [
                    {"chosen_ids": closed(*chosen), "rejected_ids": closed(*rejected), **margin}
                    for chosen, rejected in pairs
                ]
            ),
            processing_class=AutoTokenizer.from_pretrained(self.models / "blocks"),
            optimizers=(optimizer, constant),
        )
