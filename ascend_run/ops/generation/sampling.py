"""Choose the next token of a sequence from its logits.

Processors, and their order, are those of transformers' ``generate``: repetition penalty (Keskar et
al. 2019, arXiv:1909.05858), temperature, top-k (Fan et al. 2018, arXiv:1805.04833), top-p (Holtzman
et al. 2020, arXiv:1904.09751), min-p (Nguyen et al. 2024, arXiv:2407.01082).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

# V vocabulary, R rows of a step's logits

_LIMITS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "temperature": (lambda value: 0 <= value < math.inf, "at least 0; 0 takes the most probable"),
    "top_k": (lambda value: value >= 0, "at least 1, or 0 for all"),
    "top_p": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "min_p": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "above 0; 1 changes nothing"),
    "seed": (lambda value: 0 <= value < 2**63, "from 0 to 2**63 - 1"),
    "logprobs": (lambda value: value is None or value >= 0, "at least 0"),
}


def sampling_problems(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of ``Sampling`` whose values are out of range, with what is expected."""
    return {
        name: f"expected a number {expected}"
        for name, (holds, expected) in _LIMITS.items()
        if name in values and not holds(values[name])
    }


@attrs.frozen(kw_only=True)
class Sampling:
    """How the tokens of a request are chosen; by default the most probable one.

    Raises:
        ValueError: A value is out of range.
    """

    temperature: float = 0.0
    """Divides the logits; 0: the most probable token, and no draws."""
    top_k: int = 0
    """Draw of the most probable ones only; 0: of all."""
    top_p: float = 1.0
    """Draw of the most probable ones whose probabilities just exceed this."""
    min_p: float = 0.0
    """Draw of those with at least this part of the largest probability."""
    repetition_penalty: float = 1.0
    """Divides the logits above 0, and multiplies those below, of tokens in the prompt or after."""
    seed: int = 0
    logprobs: int | None = None
    """Most probable tokens whose log-probabilities are wanted; 0: of the chosen one alone."""

    def __attrs_post_init__(self) -> None:
        if problems := sampling_problems(attrs.asdict(self)):
            raise ValueError(", ".join(f"{name}: {text}" for name, text in problems.items()))

    def of_prompt(self, index: int) -> Sampling:
        """Return the sampling of one of several prompts: equal prompts get draws of their own."""
        digest = hashlib.sha256(f"{self.seed} {index}".encode()).digest()
        return attrs.evolve(self, seed=int.from_bytes(digest[:8], "big") >> 1)


@attrs.frozen
class Choice:
    """A token, with log-probabilities if they are wanted."""

    token: int
    logprob: float | None = None
    """By the model's own distribution, before any processor."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with theirs, largest first."""


class Sampler:
    """Chooses the tokens of one request.

    It has a generator of its own, from which one number is drawn for each token: so the tokens do
    not depend on what else is in the batch.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    @property
    def is_plain(self) -> bool:
        """Whether it takes the largest logit, and nothing more is wanted."""
        wanted = self.sampling
        return not wanted.temperature and wanted.repetition_penalty == 1 and wanted.logprobs is None

    def choose(self, logits_V: Tensor, ids: Sequence[int]) -> Choice:
        """Choose the token after ``ids``, the prompt and the new tokens so far."""
        logits_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))
        scores_V = processed(logits_V, ids, self.sampling)
        token = int(self._drawn(scores_V) if self.sampling.temperature else scores_V.argmax())
        if (count := self.sampling.logprobs) is None:
            return Choice(token)
        logprobs_V = logits_V.log_softmax(-1)
        top = logprobs_V.topk(min(count, len(logprobs_V)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return Choice(token, float(logprobs_V[token]), tuple(pairs))

    def _drawn(self, scores_V: Tensor) -> Tensor:
        cumulative_V = scores_V.double().softmax(-1).cumsum(-1)
        cumulative_V /= cumulative_V[-1].clone()  # so the last is 1, above every draw
        drawn = torch.rand(1, dtype=torch.float64, generator=self._generator)
        return torch.searchsorted(cumulative_V, drawn.to(scores_V.device), right=True)


def choices(
    logits_RV: Tensor, samplers: Sequence[Sampler], ids: Sequence[Sequence[int]]
) -> list[Choice]:
    """Choose a token for each row.

    Args:
        ids: Of each row: the prompt and the new tokens so far.
    """
    most_probable = logits_RV.argmax(-1).tolist()
    return [
        Choice(most_probable[row]) if sampler.is_plain else sampler.choose(logits_RV[row], ids[row])
        for row, sampler in enumerate(samplers)
    ]


def processed(logits_V: Tensor, ids: Sequence[int], sampling: Sampling) -> Tensor:
    """Return the logits to choose by: -inf for tokens that cannot be drawn.

    Numerics: bitwise those of transformers' processors.
    """
    if sampling.repetition_penalty != 1:
        logits_V = penalised(logits_V, ids, sampling.repetition_penalty)
    if not sampling.temperature:
        return logits_V
    if sampling.temperature != 1:
        logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < len(logits_V):
        smallest = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -math.inf)
    if sampling.top_p < 1:
        sorted_V, order_V = logits_V.sort()
        removed_V = sorted_V.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        removed_V[-1] = False
        logits_V = logits_V.masked_fill(removed_V.scatter(0, order_V, removed_V), -math.inf)
    if sampling.min_p:
        probabilities_V = logits_V.softmax(-1)
        removed_V = probabilities_V < sampling.min_p * probabilities_V.amax()
        removed_V[probabilities_V.argmax()] = False
        logits_V = logits_V.masked_fill(removed_V, -math.inf)
    return logits_V


def penalised(logits_V: Tensor, ids: Sequence[int], penalty: float) -> Tensor:
    """Make tokens that have occurred less probable, with a penalty above 1."""
    seen = torch.tensor(sorted({*ids}), device=logits_V.device)
    of_seen = logits_V[seen]
    changed = torch.where(of_seen < 0, of_seen * penalty, of_seen / penalty)
    return logits_V.index_copy(0, seen, changed)
