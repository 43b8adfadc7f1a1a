"""What ``preprocess`` read, dropped and wrote, as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from .lengths import Lengths
from .page import DataPage

_NAMED: Final = 5
"""Files named on the page."""


@attrs.frozen(kw_only=True)
class PartReport:
    """A pair of token files that was written."""

    prefix: str
    documents: int
    tokens: int
    lengths: Lengths


@attrs.frozen(kw_only=True)
class PreprocessReport:
    """Summary of what was read, dropped and written."""

    train: PartReport
    heldout: PartReport | None
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    eod: int | None
    files: int
    input_bytes: int
    duplicates: int
    """Number of duplicate documents that were dropped."""
    empty: int
    """Number of empty documents that were dropped."""
    undecodable: tuple[str, ...]
    """Files that were skipped because they cannot be decoded."""
    seconds: float

    @property
    def parts(self) -> Mapping[str, PartReport]:
        """``training`` and ``held out``, as far as they were written."""
        parts = {"training": self.train, "held out": self.heldout}
        return {name: part for name, part in parts.items() if part is not None}

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        megabytes = self.input_bytes / 1e6
        yield (
            f"read {self.files:,} files, {megabytes:,.1f} MB in {self.seconds:.1f} s "
            f"({megabytes / max(self.seconds, 1e-9):.1f} MB/s)"
        )
        yield f"dropped {self.duplicates:,} duplicates, {self.empty:,} empty documents"
        for path in self.undecodable:
            yield f"skipped, not decodable: {path}"
        yield (
            f"tokenizer {self.tokenizer}: {self.vocab_size:,} tokens, "
            f"fingerprint {self.tokenizer_sha256[:12]}"
        )
        for name, part in self.parts.items():
            yield f"{name}: {part.documents:,} documents, {part.tokens:,} tokens in {part.prefix}"
            yield f"length of a document: {part.lengths.sentence()}"
            yield from part.lengths.picture()

    def page(self) -> DataPage:
        """Return the report as a page."""
        reasons = (
            ("duplicate", self.duplicates, ""),
            ("empty", self.empty, ""),
            ("not decodable", len(self.undecodable), ", ".join(self.undecodable[:_NAMED])),
        )
        return DataPage(
            name=self.train.prefix,
            source=f"{self.files:,} files, {self.input_bytes / 1e6:,.1f} MB",
            counts={
                f"{what}, {name}": count
                for name, part in self.parts.items()
                for what, count in (("Documents", part.documents), ("Tokens", part.tokens))
            },
            left_out=[reason for reason in reasons if reason[1]],
            lengths={f"Documents, {name}": part.lengths for name, part in self.parts.items()},
        )
