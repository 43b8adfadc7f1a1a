"""How questions are asked. Imports no torch."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import attrs

from .prompts import Form
from .results import Programs
from .sandbox import Limits

if TYPE_CHECKING:
    from ascend_run.ops.generation.sampling import Sampling


class ScoredBy(StrEnum):
    """How the answer of a question with labels is found."""

    LOGPROB = "logprob"  #: The label with the largest log-probability after the prompt.
    TEXT = "text"  #: The label that the generated text names.


@attrs.frozen(kw_only=True)
class ProgramOptions:
    """Consent to run the programs that a model writes, and how they are written and run."""

    limits: Limits = attrs.field(factory=Limits)
    samples: int = 1
    """Programs of each question."""
    sampling: Sampling | None = None
    """None: the most probable tokens."""

    def record(self) -> Programs:
        """Return what the results say of it."""
        if self.sampling is None:
            return Programs(samples=self.samples, sampling="the most probable tokens")
        drawn = self.sampling
        return Programs(
            samples=self.samples,
            sampling=f"temperature {drawn.temperature:g}, top-p {drawn.top_p:g}, seed {drawn.seed}",
        )


@attrs.frozen(kw_only=True)
class TaskOptions:
    """How questions are asked."""

    form: Form = Form.DIRECT
    scored_by: ScoredBy = ScoredBy.LOGPROB
    num_examples: int | None = None
    """In each prompt; None: the task's, if the files have so many."""
    limit: int | None = None
    """Questions of each subject; None: all."""
    max_new_tokens: int | None = None
    """None: the task's."""
    programs: ProgramOptions | None = None
    """None: no program may be run."""
