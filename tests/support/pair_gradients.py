"""Gradients of a batch of pairs in float64, by trl's trainers and by a formula of transformers'
logits; and how far those of a run are from them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.testing.pool import GlooPool

from .folder_gradients import errors_of_gradients, write_gradients
from .plain_preferences import log_probability
from .preference_files import tokenized
from .trl_steps import TrlSteps

PAIRS, PACKS = 4, 2
"""Of the training file, and the samples that they fill when packed."""


class _WholeLogits:
    """In place of trl's chunked log-probabilities, whose accumulators are always float32."""

    @staticmethod
    def apply(
        hidden_TH: Tensor, weight_VH: Tensor, bias: None, labels_T: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        """Return log-probabilities, and zeros for what only trl's log takes."""
        each_TV = torch.log_softmax(hidden_TH @ weight_VH.T, -1)
        log_probs_T = each_TV.gather(1, labels_T[:, None]).flatten()
        zeros = [torch.zeros_like(log_probs_T) for _ in range(3)]
        return log_probs_T, *zeros, torch.zeros_like(log_probs_T, dtype=torch.bool)


@attrs.frozen(kw_only=True)
class TrlGradients(TrlSteps):
    """The gradients of the mean loss of the first ``batch`` pairs of the training file."""

    def model(self, output: Path) -> nn.Module:
        """Return the policy with its gradients."""
        # transformers and accelerate set environment variables, and warn of all sorts.
        with mock.patch.dict(os.environ), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with (
                mock.patch("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True),
                mock.patch("trl.trainer.utils._ChunkedLogProbFunction", _WholeLogits),
                computing_in(torch.float64),
            ):
                trainer: Any = self._trainer(output)
                self._check_tokens(trainer.train_dataset)
                self._backward(trainer)
        policy: nn.Module = trainer.model
        return policy

    def _backward(self, trainer: Any) -> None:
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                model.double()
        passes = self.batch // self.at_once
        for inputs in trainer.get_train_dataloader():
            loss = trainer.compute_loss(trainer.model, inputs)
            assert loss.dtype is torch.float64
            (loss / passes).backward()


def plain_gradients(
    models: Path, loss: Callable[[Tensor, Tensor], Tensor], *, sft_weight: float = 0.0
) -> nn.Module:
    """Return the policy with the gradients of the mean loss of the pairs of the training file.

    Args:
        loss: From the mean log-probabilities of chosen and rejected answer to the loss of the pair.
    """
    pairs = tokenized(models / "blocks", models / "train.jsonl")
    with computing_in(torch.float64):
        model = LlamaForCausalLM.from_pretrained(models / "model").double()
        for pair in pairs:
            means = [log_probability(model, (ids, on)) / sum(on[1:]) for ids, on in pair]
            ((loss(*means) - sft_weight * means[0]) / len(pairs)).backward()
    return model


def assert_gradients_are_those_of(
    gloo_pool: GlooPool,
    model: nn.Module,
    tmp_path: Path,
    values: Callable[..., Mapping[str, Any]],
    packing: bool,
) -> None:
    """Compare each parameter's gradient of a run on ``PAIRS`` pairs.

    Args:
        model: With the gradients wanted.
        values: From changes to the run's values.
    """
    write_gradients(model, tmp_path / "gradients")
    run = values(train__global_batch_size=PACKS if packing else PAIRS)
    (errors,) = gloo_pool.run(errors_of_gradients, 1, run, str(tmp_path / "gradients"), timeout=100)
    assert errors
    assert max(errors.values()) < 1e-10, errors
