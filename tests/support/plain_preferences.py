"""Preference optimization by transformers and torch alone: whole logits, one answer at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from .tiny_llama import adamw

Answer = tuple[list[int], list[bool]]
"""Token ids, and which of them are trained."""
Pair = tuple[Answer, Answer]
"""Chosen and rejected."""


def smoothed(beta: float, e: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda chosen, rejected: (
        -(1 - e) * torch.sigmoid(beta * (chosen - rejected)).log()
        - e * torch.sigmoid(-beta * (chosen - rejected)).log()
    )


SIGMOID: Final = smoothed(0.1, 0.0)


@attrs.frozen(kw_only=True)
class PlainSteps:
    """Losses, gradient norms and metrics of AdamW steps.

    Args:
        read: Returns the policy, with what is trained of it, of the folder.
        loss: From the log-ratios of chosen and rejected answer to the loss of the pair.
        averages: Whether the loss takes means over tokens, not sums.
        logs_means: Whether the metrics are of means too.
    """

    folder: Path
    read: Callable[[Path], Any] = LlamaForCausalLM.from_pretrained
    reference: Path | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = SIGMOID
    beta: float = 0.1
    averages: bool = False
    logs_means: bool = False
    reference_free: bool = False
    sft_weight: float = 0.0
    dtype: torch.dtype = torch.float32

    def steps(self, batches: Sequence[Sequence[Pair]]) -> Iterator[dict[str, float]]:
        policy = self.read(self.folder).to(self.dtype)
        reference = (
            copy.deepcopy(policy)
            if self.reference is None
            else LlamaForCausalLM.from_pretrained(self.reference).to(self.dtype)
        ).requires_grad_(False)
        optimizer = adamw([*policy.parameters()])
        for batch in batches:
            found = [self._pair(policy, reference, pair) for pair in batch]
            total = torch.stack([loss for loss, _ in found]).mean()
            optimizer.zero_grad()
            total.backward()
            norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            means = {k: sum(m[k] for _, m in found) / len(found) for k in found[0][1]}
            yield {"loss": float(total.detach()), "grad_norm": float(norm), **means}

    def _pair(
        self, policy: nn.Module, reference: nn.Module, pair: Pair
    ) -> tuple[Tensor, dict[str, float]]:
        pi = [log_probability(policy, answer) for answer in pair]
        rho = [torch.zeros_like(p) for p in pi]
        if not self.reference_free:
            rho = [log_probability(reference, answer) for answer in pair]
        lengths = [sum(trained[1:]) for _, trained in pair]
        ratios = [p - r for p, r in zip(pi, rho, strict=True)]
        taken = ratios
        if self.averages:
            taken = [ratio / length for ratio, length in zip(ratios, lengths, strict=True)]
        loss = self.loss(*taken) - self.sft_weight * pi[0] / lengths[0]
        by = lengths if self.logs_means else [1, 1]
        chosen, rejected = (
            self.beta * float(ratio.detach()) / n for ratio, n in zip(ratios, by, strict=True)
        )
        return loss, {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": float(chosen > rejected),
            "logps/chosen": float(pi[0].detach()) / by[0],
            "logps/rejected": float(pi[1].detach()) / by[1],
            "lengths/chosen": lengths[0],
            "lengths/rejected": lengths[1],
        }


def log_probability(model: nn.Module, answer: Answer) -> Tensor:
    """Return the sum over the trained tokens."""
    ids, trained = answer
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    each = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    return each[torch.tensor(trained[1:])].sum()
