"""Results as tables for a terminal. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ascend_run.tools.terminal.tables import table

from .results import Perplexity, Results


def lines_of(results: Results) -> Iterator[str]:
    """Yield the lines of all tables."""
    if results.perplexities:
        header = ("file", "documents", "tokens", "loss", "perplexity")
        yield from table(header, [*map(_perplexity_row, results.perplexities)])


def _perplexity_row(one: Perplexity) -> Sequence[str]:
    return (
        one.name,
        str(one.documents),
        str(one.tokens),
        f"{one.loss:.4f}",
        f"{one.perplexity:.4f}",
    )
