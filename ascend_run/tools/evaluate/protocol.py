"""What a task sees of a model. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from .prompts import Prompt

if TYPE_CHECKING:
    from ascend_run.ops.generation.sampling import Sampling


class AnsweringModel(Protocol):
    """Answers prompts."""

    def fits(self, prompt: Prompt, num_new: int) -> bool:
        """Whether so many tokens can follow the prompt in the model's longest text."""
        ...

    def answers(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        stop: Sequence[str],
        sampling: Sampling | None = None,
    ) -> Iterator[str]:
        """Yield what follows each prompt, in order.

        Args:
            stop: Words before which an answer ends.
            sampling: How tokens are drawn, of each prompt by itself; None: the most probable ones.
        """
        ...

    def log_probabilities(self, pairs: Sequence[tuple[Prompt, str]]) -> Iterator[float]:
        """Yield the log-probability of each text after its prompt: the sum over its tokens."""
        ...
