"""Encode pairs of answers to token ids and labels, once per set of files. No torch.

A pair is two documents of ``Encoded``: the prompt with the chosen answer, and then the prompt with
the rejected one. The results are stored in the run's cache, as those of conversations are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import attrs

from ascend_run.plugin_api import ArrayCache, Arrays, DataError

from .encoder import NOTHING_TO_TRAIN, Encoder, accepted, batches_of, on_threads
from .encoding import TOO_LONG, TRUNCATED, Encoded, collected, file_facts
from .omissions import Omissions
from .preferences import SIDES, Pair, are_equal, checked, has_labels, label_pairs
from .reading import SampleReader
from .sample_files import read_field, read_labelled, read_sample_record
from .samples import Preference
from .task_samples import SampleEncoding

_FORMAT: Final = 2

SAME_WHEN_TRUNCATED: Final = "the same tokens when truncated"


@attrs.frozen(kw_only=True)
class PairLimit:
    """What becomes of pairs that are too long, or whose answers are equal."""

    max_positions: int
    """Positions of both documents together, ``data.seq_length``."""
    max_of_each: int | None = None
    """Positions of one of them; None: no fewer."""
    shift: int = 1
    """A document of n tokens takes n less this many: 1 if the last one is only a label."""
    too_long: str
    """``drop``; ``truncate``: cut the longer document, or both to equal lengths, at the end."""
    equal_answers: str = "refuse"
    """``refuse`` the file, or ``drop`` the pair."""

    def fit(self, source: str, pair: Pair, omissions: Omissions) -> Pair | None:
        """Return a pair that fits; None if it is left out."""
        chosen, rejected = pair
        positions = [len(document.ids) - self.shift for document in pair]
        of_each = self.max_positions if self.max_of_each is None else self.max_of_each
        if sum(positions) <= self.max_positions and max(positions) <= of_each:
            return pair
        if self.too_long == "drop":
            omissions.add(TOO_LONG, source)
            return None
        # A document that takes less than half leaves the rest to the other one.
        most = min(of_each, max(self.max_positions // 2, self.max_positions - min(positions)))
        chosen, rejected = chosen.up_to(most + self.shift), rejected.up_to(most + self.shift)
        if not (has_labels(chosen) and has_labels(rejected)):
            omissions.add(NOTHING_TO_TRAIN, source)
            return None
        if are_equal((chosen, rejected)):
            omissions.add(SAME_WHEN_TRUNCATED, source)
            return None
        omissions.add(TRUNCATED, source)
        return chosen, rejected


def pair_encoding(limit: PairLimit) -> SampleEncoding[PairLimit]:
    """Return how pairs become documents."""
    return SampleEncoding(
        kind=Preference,
        name="pairs",
        group=2,
        shift=limit.shift,
        limit=limit,
        of_files=encoded_pairs,
        of_dataset=encoded_pair_dataset,
    )


def encoded_pairs(
    files: Sequence[Path],
    reader: SampleReader,
    encoder: Encoder,
    limit: PairLimit,
    cache: ArrayCache,
) -> Encoded:
    """Return the pairs of some files, from the cache if they were encoded before.

    Raises:
        DataError: Records are malformed, the template rejects them, an answer has no token, or both
            answers are equal (all are listed); or no pair is left.
        StorageError: The cache cannot be read or written.
    """
    description = {
        "kind": "pairs",
        "format": _FORMAT,
        **file_facts(files),
        **reader.description(),
        **encoder.description(),
        **attrs.asdict(limit),
    }

    def compute() -> Arrays:
        omissions = Omissions()
        encode = partial(label_pairs, encoder=encoder, drops_equal=limit.equal_answers == "drop")
        encoded = on_threads(batches_of(reader.preferences(files)), encode)
        kept = _fitted(accepted(encoded, omissions), limit, omissions)
        return collected(kept, omissions, lambda: reader.count, files, "pairs").as_arrays()

    return Encoded.from_arrays(cache.arrays(description, compute))


def encoded_pair_dataset(prefix: str, limit: PairLimit, cache: ArrayCache) -> Encoded:
    """Return the pairs in token files, from the cache if they were read before.

    Raises:
        DataError: The files are damaged, a pair cannot be used, or no pair is left.
        StorageError: The cache cannot be read or written.
    """
    record = read_sample_record(prefix)
    description = {
        "kind": "token files of pairs",
        "format": _FORMAT,
        **record.facts(prefix),
        **attrs.asdict(limit),
    }

    def compute() -> Arrays:
        omissions, count = Omissions(), record.report.samples
        drops = limit.equal_answers == "drop"
        read = (
            ([source], [checked(pair, drops_equal=drops)]) for source, pair in read_pairs(prefix)
        )
        kept = _fitted(accepted(read, omissions), limit, omissions)
        return collected(kept, omissions, lambda: count, [Path(prefix)], "pairs").as_arrays()

    return Encoded.from_arrays(cache.arrays(description, compute))


def read_pairs(prefix: str) -> Iterator[tuple[str, Pair]]:
    """Yield the pairs of a dataset with ``PREFIX:number``, from 1.

    Raises:
        DataError: The files are damaged, or do not hold pairs.
    """
    record = read_sample_record(prefix)
    chosen, rejected = (
        len(read_field(prefix, f"{side}_input_ids", record).lengths) for side in SIDES
    )
    if chosen != rejected:
        raise DataError(
            f"{prefix}: it has {chosen} chosen and {rejected} rejected answers; make the dataset "
            "again with ascend-run preprocess"
        )
    sides = (read_labelled(prefix, f"{side}_") for side in SIDES)
    for (source, better), (_, worse) in zip(*sides, strict=True):
        yield source, (better, worse)


def _fitted(
    pairs: Iterable[tuple[str, Pair]], limit: PairLimit, omissions: Omissions
) -> Iterator[Pair]:
    for source, pair in pairs:
        if (fits := limit.fit(source, pair, omissions)) is not None:
            yield fits
