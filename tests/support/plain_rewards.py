"""Rewards of answers by transformers and torch alone: one answer at a time, no padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from .plain_preferences import Pair
from .tiny_llama import adamw


def write_scorer(folder: Path, like: Path, num_labels: int = 1, seed: int = 5) -> Path:
    """Write a model for sequence classification with the weights of one with an output layer."""
    torch.manual_seed(seed)
    model = LlamaForSequenceClassification.from_pretrained(like, num_labels=num_labels)
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def closed(ids: list[int], trained: list[bool]) -> list[int]:
    """Return the ids up to the end of the answer."""
    return ids[: max(at for at, is_trained in enumerate(trained) if is_trained) + 1]


def scorer(folder: Path, head_KH: Tensor | None = None) -> LlamaForSequenceClassification:
    """Return the model of a folder, in evaluation.

    Args:
        head_KH: Weight of its head, for a folder with an output layer.
    """
    config = LlamaConfig.from_pretrained(folder, num_labels=1)
    model = LlamaForSequenceClassification.from_pretrained(folder, config=config).eval()
    if head_KH is not None:
        with torch.no_grad():
            model.score.weight.copy_(head_KH)
    return model


@attrs.frozen(kw_only=True)
class PlainRewards:
    """Losses, gradient norms and metrics of AdamW steps on pairs."""

    model: LlamaForSequenceClassification
    margin: float = 0.0
    centering: float = 0.0

    def steps(self, batches: Sequence[Sequence[Pair]]) -> Iterator[dict[str, float]]:
        optimizer = adamw([*self.model.parameters()])
        for batch in batches:
            optimizer.zero_grad()
            means = self.backward(batch)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            yield {**means, "grad_norm": float(norm)}

    def backward(self, batch: Sequence[Pair]) -> dict[str, float]:
        """Add the gradients of the mean loss; return it, and the metrics."""
        rewards = torch.stack([torch.stack([self._reward(*one) for one in pair]) for pair in batch])
        chosen, rejected = rewards.unbind(1)
        losses = torch.log1p(torch.exp(-(chosen - rejected - self.margin)))
        losses = losses + self.centering * (chosen + rejected) ** 2
        losses.mean().backward()
        chosen, rejected = chosen.detach(), rejected.detach()
        means = {
            "loss": losses.detach(),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).double(),
        }
        return {name: float(value.mean()) for name, value in means.items()}

    def _reward(self, ids: list[int], trained: list[bool]) -> Tensor:
        return self.model(input_ids=torch.tensor([closed(ids, trained)])).logits[0, 0]
