"""Options of ``ascend-run preprocess`` and their validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

from ascend_run.text.dataset_paths import bin_path, idx_path, sidecar_path, tokenizer_files
from ascend_run.text.document_files import InputFile
from ascend_run.text.file_collisions import NamedPath, file_collisions
from ascend_run.tools.preprocess.tokenizer_users import datasets_made_with

_FILES_OF_A_DATASET: Final = {
    "the token file": bin_path,
    "the index": idx_path,
    "the record": sidecar_path,
}


@attrs.frozen(kw_only=True)
class PreprocessOptions:
    """What to read and where to write.

    Exactly one of ``tokenizer`` and ``train_vocab_size`` is set.
    """

    inputs: tuple[Path, ...]
    output_prefix: Path
    tokenizer: Path | None = None
    train_vocab_size: int | None = None
    """Train a tokenizer of this size on the training documents."""
    tokenizer_out: Path | None = None
    """File for the trained tokenizer; default: ``tokenizer.json`` next to the output."""
    end_token: str | None = None
    format: str = "auto"
    json_key: str = "text"
    append_eod: bool = True
    """Append the end-of-document token to every document."""
    holdout: float = 0.0
    """Fraction of the documents to hold out."""
    heldout_prefix: Path | None = None
    """Default: the output prefix with ``-heldout`` appended."""
    skip_undecodable: bool = False
    workers: int = 1
    """Processes that encode, at most."""
    report: Path | None = None
    """Page to write."""
    overwrite: bool = False

    def problems(self) -> Iterator[str]:
        """Yield a message for each contradiction and each value out of range."""
        if (self.tokenizer is None) == (self.train_vocab_size is None):
            yield "give either --tokenizer PATH or --train-tokenizer VOCAB_SIZE"
        if self.tokenizer_out is not None and self.train_vocab_size is None:
            yield "--tokenizer-out is for --train-tokenizer; leave it out"
        if not 0.0 <= self.holdout < 1.0:
            yield f"--holdout must be at least 0 and below 1, got {self.holdout}"
        if self.heldout_prefix is not None and not self.holdout:
            yield "--heldout-prefix is for --holdout FRACTION; give a fraction, or leave it out"

    def prefixes(self) -> dict[str, Path]:
        """Return option -> prefix of each dataset to write, the training documents first."""
        written = {"--output-prefix": self.output_prefix}
        if self.holdout:
            own = self.heldout_prefix or Path(f"{self.output_prefix}-heldout")
            written["--heldout-prefix"] = own
        return written

    def trained_tokenizer(self) -> Path | None:
        """File for the trained tokenizer; None if a tokenizer is given."""
        if self.train_vocab_size is None:
            return None
        return self.tokenizer_out or self.output_prefix.with_name("tokenizer.json")

    def collisions(self, files: Sequence[InputFile]) -> list[str]:
        """Return messages for outputs that are an input, the tokenizer, another output or the
        tokenizer of another dataset."""
        inputs = [NamedPath("the input", file.path) for file in files]
        if self.tokenizer is not None:
            inputs += [NamedPath("--tokenizer", path) for path in tokenizer_files(self.tokenizer)]
        outputs = [
            NamedPath(f"{what} of {option}", path(prefix))
            for option, prefix in self.prefixes().items()
            for what, path in _FILES_OF_A_DATASET.items()
        ]
        if self.report is not None:
            outputs.append(NamedPath("--report", self.report))
        if (trained := self.trained_tokenizer()) is None:
            return file_collisions(inputs, outputs)
        new_tokenizer = NamedPath("the trained tokenizer", trained)
        found = file_collisions(inputs, [*outputs, new_tokenizer])
        return [*found, *self._tokenizer_of_others(new_tokenizer)]

    def _tokenizer_of_others(self, trained: NamedPath) -> Iterator[str]:
        """A sentence where datasets that stay were made with the tokenizer that stands there."""
        folders = (trained.path.parent, self.output_prefix.parent)
        replaced = {
            path.absolute().parent.resolve() / path.name for path in self.prefixes().values()
        }
        users = [path for path in datasets_made_with(trained.path, folders) if path not in replaced]
        if users:
            yield (
                f"{trained} would replace the tokenizer that {', '.join(map(str, users))} "
                f"{'was' if len(users) == 1 else 'were'} made with; name another with "
                "--tokenizer-out, or use that one: --tokenizer"
            )
