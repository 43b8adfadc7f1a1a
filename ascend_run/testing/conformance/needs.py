"""Check that a plugin declares which features it needs of the attention kernel."""

from __future__ import annotations

from collections.abc import Iterator

from .numbers import stepping, tried
from .subject import Subject


def are_declared(subject: Subject) -> Iterator[str]:
    """Check that the kernel is called with no feature that neither an option nor a manifest of the
    run's plugins needs: a kernel without it would be accepted, and ignore it."""
    for scenario in tried(subject):
        trial = stepping(subject, scenario, 0, scenario.chosen)
        ranks = subject.means.run(trial, scenario.world_size)
        for name in sorted({name for rank in ranks for name in rank.undeclared_attention}):
            yield (
                f"{scenario}, the attention kernel is called with '{name}', which neither an "
                f"option nor a manifest needs; add attention_needs=AttentionFeatures({name}=True)"
            )
