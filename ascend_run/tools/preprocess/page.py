"""The report of ``preprocess`` as a page: counts, what was left out and why, and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from ascend_run import __version__
from ascend_run.tools.pages.bar_chart import Bar, bar_figure
from ascend_run.tools.pages.frame import document, section
from ascend_run.tools.pages.markup import Markup, details, element, join, table

from .lengths import Lengths


@attrs.frozen(kw_only=True)
class DataPage:
    """What the page shows."""

    name: str
    """Prefix of the token files."""
    source: str
    """What was read."""
    counts: Mapping[str, int]
    """Name of a count -> its value, as key figures."""
    left_out: Sequence[tuple[str, int, str]]
    """Reason, number, and the first that were left out for it."""
    lengths: Mapping[str, Lengths]
    """Dataset or field -> its lengths."""

    def render(self) -> str:
        """Return the page as text."""
        figures = [
            element("div", element("dt", name), element("dd", element("strong", f"{count:,}")))
            for name, count in self.counts.items()
        ]
        top = [
            element("h1", self.name),
            element("p", self.source, class_="lead"),
            element("dl", *figures, class_="figures"),
        ]
        return document(
            title=f"{self.name} \N{MIDDLE DOT} ascend-run data",
            brand="ascend-run data",
            top=join(top),
            sections=[
                section("lengths", "Lengths", *self._pictures()),
                section("left-out", "Left out", self._reasons()),
            ],
            foot=element("p", f"Written by ascend-run {__version__}."),
            data={},
            scripts=(),
        )

    def _pictures(self) -> Iterator[Markup]:
        for name, lengths in self.lengths.items():
            bars = [
                Bar(part.name, [(0, part.count, f"{part.count:,}")], f"{part.count:,}")
                for part in lengths.bins
            ]
            title = f"{name}: number by length in tokens"
            rows = [[part.name, f"{part.count:,}"] for part in lengths.bins]
            figure = bar_figure(title, None, bars, lengths.sentence())
            yield element("div", figure, class_="bars")
            yield details("As a table", table(("tokens", "number"), rows))

    def _reasons(self) -> Markup:
        if not self.left_out:
            return element("p", "Nothing was left out.")
        rows = [[reason, f"{count:,}", first] for reason, count, first in self.left_out]
        return table(("reason", "number", "first"), rows)
