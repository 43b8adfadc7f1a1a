"""Encode files of conversations to token ids and labels, once per set of files.

The results are stored in the run's cache. Cost: rendering and tokenization, about half a
millisecond per 300 tokens; later runs verify the cached arrays and map them into memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from ascend_run.plugin_api import ArrayCache, Arrays, DataError

from .chat_tokenizer import ChatTokenizer
from .labelling import Labelled, label
from .reading import SampleReader
from .samples import Conversation, texts
from .sources.problems import SHOWN_PROBLEMS
from .templates import BEGIN, END, MARK, ChatTemplate, TemplateRefusal
from .turns import Rendered, render

_FORMAT: Final = 3
_BATCH: Final = 512
"""Conversations tokenized per call."""
_NAMED: Final = 5
"""Conversations named per reason for leaving them out."""

NOTHING_TO_TRAIN: Final = "nothing to train on"
TOO_LONG: Final = "too long"
TRUNCATED: Final = "truncated"
SPELLS_SPECIAL: Final = "spells a special token"


@attrs.frozen(kw_only=True)
class Encoder:
    """Encodes conversations to samples."""

    tokenizer: ChatTokenizer
    template: ChatTemplate
    max_tokens: int
    """Tokens per conversation; one more than ``data.seq_length``, since the last one is only a
    label."""
    too_long: str
    """What to do with longer ones: ``drop``, ``truncate`` or ``turns``; see ``fit``."""
    keeps_special: bool

    def description(self, files: Sequence[Path]) -> Mapping[str, object]:
        """Return what determines the encoded samples beside how files are read: the cache key."""
        return {
            "kind": "conversations",
            "format": _FORMAT,
            "files": [_sha256(path) for path in files],
            "names": [*map(str, files)],
            "tokenizer": self.tokenizer.sha256,
            "variables": dict(self.tokenizer.variables),
            "template": self.template.source,
            "date": self.template.date,
            "max_tokens": self.max_tokens,
            "too_long": self.too_long,
            "keeps_special": self.keeps_special,
        }

    def render(self, conversation: Conversation) -> Rendered | None:
        """Return a conversation as text; None if it spells a special token and may not.

        Raises:
            TemplateRefusal: The template rejects it.
        """
        said = "\0".join(texts(conversation.messages))
        if any(mark in said for mark in (BEGIN, END, MARK)):
            raise TemplateRefusal("it holds the code points U+10FFF0 to U+10FFF2")
        if not self.keeps_special and self.tokenizer.spells_special.search(said):
            return None
        try:
            return render(self.template, conversation)
        except TemplateRefusal as refusal:
            raise TemplateRefusal(f"the chat template rejects it: {refusal}") from None

    def fit(
        self, source: str, labelled: Labelled, left_out: dict[str, list[str]]
    ) -> Labelled | None:
        """Return a conversation that fits the length; None if it is left out, with its reason.

        ``truncate`` cuts at the length, ``turns`` at the end of the last trained turn that fits.
        """
        if len(labelled.ids) > self.max_tokens and any(labelled.trained[1:]):
            end = self.max_tokens if self.too_long == "truncate" else 0
            if self.too_long == "turns":
                end = labelled.end_of_turn(self.max_tokens)
            left_out.setdefault(TRUNCATED if end else TOO_LONG, []).append(source)
            if not end:
                return None
            labelled = labelled.up_to(end)
        # The first token is never a label.
        if not any(labelled.trained[1:]):
            left_out.setdefault(NOTHING_TO_TRAIN, []).append(source)
            return None
        return labelled


@attrs.frozen(kw_only=True, eq=False)
class Encoded:
    """Samples, concatenated."""

    ids: np.ndarray[Any, Any]
    """[tokens] int32."""
    trained: np.ndarray[Any, Any]
    """[tokens] bool."""
    ends: np.ndarray[Any, Any]
    """[samples] int64: end of each sample in ``ids``."""
    report: Mapping[str, object]
    """``conversations`` read, and for each reason to leave some out ``count`` and ``first``
    (``file:line``)."""

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Encoded:
        """Rebuild from what ``as_arrays`` returns."""
        report = json.loads(arrays["report"].tobytes())
        return cls(ids=arrays["ids"], trained=arrays["trained"], ends=arrays["ends"], report=report)

    def as_arrays(self) -> Arrays:
        """Return all fields as arrays; the report as the bytes of JSON."""
        report = np.frombuffer(json.dumps(self.report).encode(), np.uint8)
        return {"ids": self.ids, "trained": self.trained, "ends": self.ends, "report": report}

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """[samples] int64. Unit: tokens."""
        return np.diff(self.ends, prepend=0)

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        begin = int(self.ends[index - 1]) if index else 0
        part = slice(begin, int(self.ends[index]))
        return self.ids[part], self.trained[part]


def encoded_files(
    files: Sequence[Path], reader: SampleReader, encoder: Encoder, cache: ArrayCache
) -> Encoded:
    """Return the samples of some files, from the cache if they were encoded before.

    Raises:
        DataError: Records are malformed, or the template rejects conversations (all are listed); or
            no sample is left.
        StorageError: The cache cannot be read or written.
    """
    description = {**encoder.description(files), **reader.description()}
    arrays = cache.arrays(description, lambda: _encode(files, reader, encoder).as_arrays())
    return Encoded.from_arrays(arrays)


def _encode(files: Sequence[Path], reader: SampleReader, encoder: Encoder) -> Encoded:
    left_out: dict[str, list[str]] = {}
    ids: list[np.ndarray[Any, Any]] = []
    trained: list[np.ndarray[Any, Any]] = []
    conversations = reader.conversations(files)
    for source, labelled in labelled_conversations(conversations, encoder, left_out):
        fitted = encoder.fit(source, labelled, left_out)
        if fitted is not None:
            ids.append(np.asarray(fitted.ids, np.int32))
            trained.append(np.asarray(fitted.trained, np.bool_))
    report = {
        "conversations": reader.count,
        "samples": len(ids),
        "left_out": {
            reason: {"count": len(sources), "first": sources[:_NAMED]}
            for reason, sources in sorted(left_out.items())
        },
    }
    if not ids:
        raise DataError(
            f"none of {reader.count} conversations in {', '.join(map(str, files))} can be trained "
            "on",
            list(left_out_reasons(report)),
        )
    return Encoded(
        ids=np.concatenate(ids),
        trained=np.concatenate(trained),
        ends=np.cumsum([len(part) for part in ids]).astype(np.int64),
        report=report,
    )


def left_out_reasons(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence per reason for which conversations were left out."""
    for reason, which in report["left_out"].items():
        more = which["count"] - len(which["first"])
        rest = f" and {more} more" if more else ""
        yield f"{reason}: {which['count']} ({', '.join(which['first'])}{rest})"


def labelled_conversations(
    conversations: Iterable[tuple[str, Conversation]],
    encoder: Encoder,
    left_out: dict[str, list[str]],
) -> Iterator[tuple[str, Labelled]]:
    """Yield each conversation that can be rendered, tokenized and labelled, with its source.

    Args:
        left_out: Reason -> the sources of those that are left out; receives more.

    Raises:
        DataError: The template rejects conversations; they are listed.
    """
    refused: list[str] = []
    remaining = iter(conversations)
    while some := [*islice(remaining, _BATCH)]:
        batch: list[tuple[str, Rendered]] = []
        for source, conversation in some:
            try:
                if (rendered := encoder.render(conversation)) is None:
                    left_out.setdefault(SPELLS_SPECIAL, []).append(source)
                else:
                    batch.append((source, rendered))
            except TemplateRefusal as refusal:
                refused.append(f"{source}: {refusal}")
        if refused:
            continue
        tokenizer = encoder.tokenizer
        encodings = tokenizer.backend.encode_batch(
            [rendered.text for _, rendered in batch], add_special_tokens=False
        )
        for (source, rendered), encoding in zip(batch, encodings, strict=True):
            yield source, label(rendered, encoding, tokenizer)
    if refused:
        shown = refused[:SHOWN_PROBLEMS]
        if len(refused) > len(shown):
            shown.append(f"{len(refused) - len(shown)} more conversations are rejected")
        raise DataError(f"{encoder.template.name} cannot render these conversations", shown)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
