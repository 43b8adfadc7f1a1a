"""Encode solutions whose steps are rated to token ids and labels, once per set of files. No torch.

A solution is one document of ``Encoded``; the token of a rating is the label at the placeholder
that ends the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from ascend_run.plugin_api import ArrayCache, Arrays, DataError

from .encoder import NOTHING_TO_TRAIN, Encoder, accepted, batches_of, on_threads
from .encoding import TOO_LONG, TRUNCATED, Encoded, collected, file_facts
from .fields import UNTRAINED, Fields, RewardTokens, field_encoder
from .labelling import Labelled
from .omissions import Omissions
from .reading import SampleReader
from .sample_files import read_field, read_sample_record
from .samples import ProcessReward
from .task_samples import SampleEncoding

_FORMAT: Final = 1


@attrs.frozen(kw_only=True)
class StepLimit:
    """The tokens of ratings, and what becomes of solutions that are too long."""

    max_tokens: int
    """Of a solution, to its last placeholder."""
    too_long: str
    """``drop``; ``truncate``: leave out the last steps."""
    placeholder: str
    rewards: tuple[str, ...]

    def tokens(self, encoder: Encoder) -> RewardTokens:
        """Return the tokens of placeholder and ratings.

        Raises:
            ConfigError: A text is not one token.
        """
        return RewardTokens.of(encoder.tokenizer, self.placeholder, self.rewards)

    def fit(self, source: str, fields: Fields, omissions: Omissions) -> Fields | None:
        """Return a solution up to its last rated step that fits; None if it is left out."""
        ids, labels = fields["input_ids"], fields["labels"]
        places = [at for at, label in enumerate(labels) if label != UNTRAINED]
        fitting = [at for at in places if at < self.max_tokens]
        if len(fitting) < len(places):
            is_cut = self.too_long == "truncate" and bool(fitting)
            omissions.add(TRUNCATED if is_cut else TOO_LONG, source)
            if not is_cut:
                return None
        if not fitting:
            omissions.add(NOTHING_TO_TRAIN, source)
            return None
        end = fitting[-1] + 1
        return {"input_ids": ids[:end], "labels": labels[:end]}


def step_encoding(limit: StepLimit) -> SampleEncoding[StepLimit]:
    """Return how rated solutions become documents."""
    return SampleEncoding(
        kind=ProcessReward,
        name="solutions",
        group=1,
        shift=0,
        limit=limit,
        of_files=encoded_steps,
        of_dataset=encoded_step_dataset,
    )


def encoded_steps(
    files: Sequence[Path],
    reader: SampleReader,
    encoder: Encoder,
    limit: StepLimit,
    cache: ArrayCache,
) -> Encoded:
    """Return the solutions of some files, from the cache if they were encoded before.

    Raises:
        ConfigError: A placeholder or rating is not one token.
        DataError: Records are malformed, the template rejects them, or placeholders and ratings do
            not match (all are listed); or no solution is left.
        StorageError: The cache cannot be read or written.
    """
    tokens = limit.tokens(encoder)
    description = {
        "kind": "rated steps",
        "format": _FORMAT,
        **file_facts(files),
        **reader.description(),
        **encoder.description(),
        **attrs.asdict(limit),
    }

    def compute() -> Arrays:
        omissions = Omissions()
        encode = field_encoder(ProcessReward, encoder, tokens)
        encoded = on_threads(batches_of(reader.read(files)), encode)
        kept = _fitted(accepted(encoded, omissions), limit, omissions)
        return _with_labels(kept, omissions, lambda: reader.count, files)

    return Encoded.from_arrays(cache.arrays(description, compute))


def encoded_step_dataset(prefix: str, limit: StepLimit, cache: ArrayCache) -> Encoded:
    """Return the solutions in token files, from the cache if they were read before.

    Raises:
        DataError: The files are damaged, were made with other placeholders or ratings, or no
            solution is left.
        StorageError: The cache cannot be read or written.
    """
    record = read_sample_record(prefix)
    made = (record.options.get("placeholder_token"), *record.options.get("reward_tokens", ()))
    if made != (limit.placeholder, *limit.rewards):
        raise DataError(
            f"{prefix} was made with the placeholder and ratings {', '.join(map(repr, made))}, and "
            f"this run has {', '.join(map(repr, (limit.placeholder, *limit.rewards)))}; make it "
            "again with ascend-run preprocess, or change the options of the run"
        )
    description = {
        "kind": "token files of rated steps",
        "format": _FORMAT,
        **record.facts(prefix),
        **attrs.asdict(limit),
    }

    def compute() -> Arrays:
        omissions, count = Omissions(), record.report.samples
        kept = _fitted(_read(prefix), limit, omissions)
        return _with_labels(kept, omissions, lambda: count, [Path(prefix)])

    return Encoded.from_arrays(cache.arrays(description, compute))


def _read(prefix: str) -> Iterator[tuple[str, Fields]]:
    """Yield the solutions of a dataset with ``PREFIX:number``, from 1."""
    record = read_sample_record(prefix)
    ids, labels = (read_field(prefix, field, record) for field in ("input_ids", "labels"))
    if not np.array_equal(ids.lengths, labels.lengths):
        raise DataError(f"{prefix}: its ids and labels have different lengths")
    all_ids, all_labels = ids.ids(), labels.ids()
    ends = np.cumsum(ids.lengths, dtype=np.int64)
    for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True), start=1):
        fields = {
            "input_ids": all_ids[begin:end].tolist(),
            "labels": all_labels[begin:end].tolist(),
        }
        yield f"{prefix}:{number}", fields


def _fitted(
    solutions: Iterable[tuple[str, Fields]], limit: StepLimit, omissions: Omissions
) -> Iterator[Fields]:
    for source, fields in solutions:
        if (fits := limit.fit(source, fields, omissions)) is not None:
            yield fits


def _with_labels(
    solutions: Iterable[Fields],
    omissions: Omissions,
    count: Callable[[], int],
    files: Sequence[Path],
) -> Arrays:
    labels: list[np.ndarray[Any, Any]] = []

    def documents() -> Iterator[tuple[Labelled]]:
        for fields in solutions:
            labels.append(np.asarray(fields["labels"], np.int32))
            trained = [label != UNTRAINED for label in fields["labels"]]
            yield (Labelled([*fields["input_ids"]], trained),)

    encoded = collected(documents(), omissions, count, files, "solutions")
    return attrs.evolve(encoded, labels=np.concatenate(labels)).as_arrays()
