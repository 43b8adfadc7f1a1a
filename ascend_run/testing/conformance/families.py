"""Check that a model family computes what transformers computes."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.testing.runtime import FamilyOutcome, load_runtime

from .check import DoesNotApply
from .scenarios import scenarios
from .subject import Subject


def equals_transformers(subject: Subject) -> Iterator[str]:
    """Check that logits, gradients, weights and config of random tiny models are transformers'."""
    if subject.facts.kind != "model family":
        raise DoesNotApply("it is not a model family")
    scenarios(subject)  # its hooks are valid
    folder = str(subject.scratch / "families")
    (outcome,) = subject.means.job(compared_family, 1, subject.name, folder)
    if outcome.not_compared:
        raise DoesNotApply(outcome.not_compared)
    yield from outcome.problems


def compared_family(name: str, folder: str) -> FamilyOutcome:
    """Compare a family. A job of the pool."""
    return load_runtime().against_transformers(name, folder)
