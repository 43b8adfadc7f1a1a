"""What encoding the samples of a data handler has read, left out and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from ascend_run.text.omissions import Omitted, left_out_reasons

from .lengths import Lengths
from .page import DataPage


@attrs.frozen(kw_only=True)
class SampleReport:
    """Summary of what was read, left out and written."""

    prefix: str
    handler: str
    files: int
    read: int
    samples: int
    left_out: Mapping[str, Omitted]
    """Reason -> samples."""
    tokens: Mapping[str, int]
    """Field -> its tokens."""
    lengths: Mapping[str, Lengths]
    """Field -> the lengths of its samples; each distribution once, so labels seldom."""
    seconds: float

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        yield f"read {self.read:,} samples of {self.files:,} files in {self.seconds:.1f} s"
        for sentence in left_out_reasons(self.left_out):
            yield f"left out, {sentence}"
        counts = ", ".join(f"{count:,} in {field}" for field, count in self.tokens.items())
        yield f"wrote {self.samples:,} samples to {self.prefix}; tokens: {counts}"
        for field, lengths in self.lengths.items():
            yield f"length of {field}: {lengths.sentence()}"
            yield from lengths.picture()

    def page(self) -> DataPage:
        """Return the report as a page."""
        return DataPage(
            name=self.prefix,
            source=f"{self.files:,} files, handler {self.handler}",
            counts={
                "Read": self.read,
                "Samples": self.samples,
                **{f"Tokens, {field}": count for field, count in self.tokens.items()},
            },
            left_out=[
                (reason, found.count, ", ".join(found.first))
                for reason, found in self.left_out.items()
            ],
            lengths=self.lengths,
        )
