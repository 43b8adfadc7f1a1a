"""Encode files of conversations to token ids and labels, once per set of files.

The results are stored in the run's cache. Cost: rendering and tokenization, about half a
millisecond per 300 tokens; later runs verify the cached arrays and map them into memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from ascend_run.plugin_api import ArrayCache, Arrays, DataError

from .encoder import NOTHING_TO_TRAIN, Encoder, accepted, batches_of, on_threads
from .labelling import Labelled
from .omissions import Omissions, Omitted, all_omitted, left_out_reasons, omitted_of_json
from .reading import SampleReader
from .sample_files import is_sample_dataset, read_labelled, read_sample_record
from .sources import find_sources

_FORMAT: Final = 5

TOO_LONG: Final = "too long"
TRUNCATED: Final = "truncated"


@attrs.frozen(kw_only=True)
class Reading:
    """What was read, and what was left out. Serializable as JSON."""

    conversations: int
    """Conversations or pairs read."""
    samples: int
    """Those that are left."""
    left_out: Mapping[str, Omitted]
    """Reason -> those left out."""


@attrs.frozen(kw_only=True, eq=False)
class Encoded:
    """The documents of samples, concatenated: one of a conversation, two of a pair."""

    ids: np.ndarray[Any, Any]
    """[tokens] int32."""
    trained: np.ndarray[Any, Any]
    """[tokens] Weight of each token's loss: bool; float32 if one is neither 0 nor 1."""
    ends: np.ndarray[Any, Any]
    """[documents] int64: end of each document in ``ids``."""
    report: Reading
    labels: np.ndarray[Any, Any] | None = None
    """[tokens] int32: the label of each token, or -100; None if the tokens are labels."""

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Encoded:
        """Rebuild from what ``as_arrays`` returns."""
        values = json.loads(arrays["report"].tobytes())
        report = Reading(**{**values, "left_out": omitted_of_json(values["left_out"])})
        ids, trained, ends = (arrays[name] for name in ("ids", "trained", "ends"))
        return cls(ids=ids, trained=trained, ends=ends, report=report, labels=arrays.get("labels"))

    def as_arrays(self) -> Arrays:
        """Return all fields as arrays; the report as the bytes of JSON."""
        report = np.frombuffer(json.dumps(attrs.asdict(self.report)).encode(), np.uint8)
        labels = {} if self.labels is None else {"labels": self.labels}
        arrays = {"ids": self.ids, "trained": self.trained, "ends": self.ends, **labels}
        return {**arrays, "report": report}

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """[documents] int64. Unit: tokens."""
        return np.diff(self.ends, prepend=0)

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        part = self._part(index)
        return self.ids[part], self.trained[part]

    def labels_of(self, index: int) -> np.ndarray[Any, Any]:
        """Return the labels of a document."""
        return (self.ids if self.labels is None else self.labels)[self._part(index)]

    def _part(self, index: int) -> slice:
        return slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))


@attrs.frozen(kw_only=True)
class LengthLimit:
    """What becomes of conversations that are too long."""

    max_tokens: int
    """Tokens per conversation; one more than ``data.seq_length``, since the last one is only a
    label."""
    too_long: str
    """``drop``; ``truncate``: cut at the length; ``turns``: cut at the end of the last trained turn
    that fits."""

    def fit(self, source: str, labelled: Labelled, omissions: Omissions) -> Labelled | None:
        """Return a conversation that fits; None if it is left out."""
        if len(labelled.ids) > self.max_tokens and any(labelled.trained[1:]):
            end = self.max_tokens if self.too_long == "truncate" else 0
            if self.too_long == "turns":
                end = labelled.end_of_turn(self.max_tokens)
            omissions.add(TRUNCATED if end else TOO_LONG, source)
            if not end:
                return None
            labelled = labelled.up_to(end)
        # The first token is never a label.
        if not any(labelled.trained[1:]):
            omissions.add(NOTHING_TO_TRAIN, source)
            return None
        return labelled


def encoded_files(
    files: Sequence[Path],
    reader: SampleReader,
    encoder: Encoder,
    limit: LengthLimit,
    cache: ArrayCache,
) -> Encoded:
    """Return the samples of some files, from the cache if they were encoded before.

    Raises:
        DataError: Records are malformed, or the template rejects conversations (all are listed); or
            no sample is left.
        StorageError: The cache cannot be read or written.
    """
    description = {
        "kind": "conversations",
        "format": _FORMAT,
        **file_facts(files),
        **reader.description(),
        **encoder.description(),
        **attrs.asdict(limit),
    }

    def compute() -> Arrays:
        omissions = Omissions()
        encoded = on_threads(batches_of(reader.conversations(files)), encoder.label)
        kept = _fitted(accepted(encoded, omissions), limit, omissions)
        return collected(kept, omissions, lambda: reader.count, files).as_arrays()

    return Encoded.from_arrays(cache.arrays(description, compute))


def encoded_dataset(prefix: str, limit: LengthLimit, cache: ArrayCache) -> Encoded:
    """Return the conversations in token files, from the cache if they were read before.

    Raises:
        DataError: The files are damaged, or no conversation is left.
        StorageError: The cache cannot be read or written.
    """
    record = read_sample_record(prefix)
    description = {
        "kind": "token files of conversations",
        "format": _FORMAT,
        **record.facts(prefix),
        **attrs.asdict(limit),
    }

    def compute() -> Arrays:
        omissions, count = Omissions(), record.report.samples
        kept = _fitted(read_labelled(prefix), limit, omissions)
        return collected(kept, omissions, lambda: count, [Path(prefix)]).as_arrays()

    return Encoded.from_arrays(cache.arrays(description, compute))


def encoded_sources(
    paths: Sequence[str],
    of_files: Callable[[Sequence[Path]], Encoded],
    of_dataset: Callable[[str], Encoded],
) -> Encoded:
    """Return the samples of files, folders and token files, in their order.

    Args:
        of_files: Encodes neighbouring files together.
        of_dataset: Reads the token files of a prefix.
    """
    parts: list[Encoded] = []
    for is_dataset, some in groupby(paths, is_sample_dataset):
        if is_dataset:
            parts += map(of_dataset, some)
        else:
            files, _ = find_sources([*some])
            parts.append(of_files(files))
    return joined(parts)


def joined(parts: Sequence[Encoded]) -> Encoded:
    """Return the samples of several parts, in order."""
    if len(parts) == 1:
        return parts[0]
    labels = [part.labels for part in parts if part.labels is not None]
    begins = np.cumsum([0, *(len(part.ids) for part in parts[:-1])])
    return Encoded(
        ids=np.concatenate([part.ids for part in parts]),
        trained=np.concatenate([part.trained for part in parts]),
        ends=np.concatenate([part.ends + begin for part, begin in zip(parts, begins, strict=True)]),
        labels=np.concatenate(labels) if labels else None,
        report=Reading(
            conversations=sum(part.report.conversations for part in parts),
            samples=sum(part.report.samples for part in parts),
            left_out=all_omitted(part.report.left_out for part in parts),
        ),
    )


def _fitted(
    labelled: Iterable[tuple[str, Labelled]], limit: LengthLimit, omissions: Omissions
) -> Iterator[tuple[Labelled]]:
    for source, conversation in labelled:
        if (fits := limit.fit(source, conversation, omissions)) is not None:
            yield (fits,)


def collected(
    samples: Iterable[Sequence[Labelled]],
    omissions: Omissions,
    count: Callable[[], int],
    files: Sequence[Path],
    kind: str = "conversations",
) -> Encoded:
    """Return the documents of samples, one after another.

    Args:
        samples: The documents of each.
        omissions: What was left out, once all samples have been taken.
        count: Number of samples read, likewise.
        files: Where they come from, for the message; ``kind`` is what it calls them.

    Raises:
        DataError: No sample is left.
    """
    ids: list[np.ndarray[Any, Any]] = []
    trained: list[np.ndarray[Any, Any]] = []
    kept = 0
    for documents in samples:
        kept += 1
        ids += [np.asarray(document.ids, np.int32) for document in documents]
        trained += [_weights(document) for document in documents]
    left_out = omissions.report()
    if not ids:
        raise DataError(
            f"none of {count()} {kind} in {', '.join(map(str, files))} can be trained on",
            list(left_out_reasons(left_out)),
        )
    return Encoded(
        ids=np.concatenate(ids),
        trained=np.concatenate(trained),
        ends=np.cumsum([len(part) for part in ids]).astype(np.int64),
        report=Reading(conversations=count(), samples=kept, left_out=left_out),
    )


def _weights(document: Labelled) -> np.ndarray[Any, Any]:
    weights = np.asarray(document.trained, np.float32)
    is_trained = weights.astype(np.bool_)
    return is_trained if np.array_equal(is_trained, weights) else weights


def file_facts(files: Sequence[Path]) -> Mapping[str, object]:
    """Return the names and digests of files, as part of a cache key."""
    return {"files": [_sha256(path) for path in files], "names": [*map(str, files)]}


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
