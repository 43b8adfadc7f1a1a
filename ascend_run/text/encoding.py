"""Encode files of conversations to token ids and labels, once per set of files.

The results are stored in the run's cache. Cost: rendering and tokenization, about half a
millisecond per 300 tokens; later runs verify the cached arrays and map them into memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from ascend_run.plugin_api import ArrayCache, Arrays, DataError

from .chat_tokenizer import ChatTokenizer
from .conversations import SHOWN_PROBLEMS, Conversation, read_conversations, texts
from .labelling import Labelled, label
from .templates import BEGIN, END, MARK, ChatTemplate, TemplateRefusal
from .turns import Rendered, render

_FORMAT: Final = 2
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
    truncates: bool
    keeps_special: bool

    def description(self, files: Sequence[str]) -> Mapping[str, object]:
        """Return everything that determines the encoded samples, as the cache key."""
        return {
            "kind": "conversations",
            "format": _FORMAT,
            "files": [_sha256(path) for path in files],
            "names": [*files],
            "tokenizer": self.tokenizer.sha256,
            "variables": dict(self.tokenizer.variables),
            "template": self.template.source,
            "date": self.template.date,
            "max_tokens": self.max_tokens,
            "truncates": self.truncates,
            "keeps_special": self.keeps_special,
        }


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


def encoded_files(files: Sequence[str], encoder: Encoder, cache: ArrayCache) -> Encoded:
    """Return the samples of some files, from the cache if they were encoded before.

    Raises:
        DataError: Lines are malformed, or the template rejects conversations (all are listed); or
            no sample is left.
        StorageError: The cache cannot be read or written.
    """
    arrays = cache.arrays(encoder.description(files), lambda: _encode(files, encoder).as_arrays())
    return Encoded.from_arrays(arrays)


def _encode(files: Sequence[str], encoder: Encoder) -> Encoded:
    problems: list[str] = []
    conversations: list[Conversation] = []
    for path in files:
        found, wrong = read_conversations(path)
        conversations += found
        problems += wrong
    if problems:
        raise DataError("these conversations cannot be read", problems)
    left_out: dict[str, list[str]] = {}
    ids: list[np.ndarray[Any, Any]] = []
    trained: list[np.ndarray[Any, Any]] = []
    for source, labelled in _labelled(conversations, encoder, left_out):
        if len(labelled.ids) > encoder.max_tokens and any(labelled.trained[1:]):
            if not encoder.truncates:
                left_out.setdefault(TOO_LONG, []).append(source)
                continue
            left_out.setdefault(TRUNCATED, []).append(source)
            labelled = Labelled(
                labelled.ids[: encoder.max_tokens], labelled.trained[: encoder.max_tokens]
            )
        # The first token is never a label.
        if not any(labelled.trained[1:]):
            left_out.setdefault(NOTHING_TO_TRAIN, []).append(source)
            continue
        ids.append(np.asarray(labelled.ids, np.int32))
        trained.append(np.asarray(labelled.trained, np.bool_))
    report = {
        "conversations": len(conversations),
        "samples": len(ids),
        "left_out": {
            reason: {"count": len(sources), "first": sources[:_NAMED]}
            for reason, sources in sorted(left_out.items())
        },
    }
    if not ids:
        raise DataError(
            f"none of {len(conversations)} conversations in {', '.join(files)} can be trained on",
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


def _labelled(
    conversations: Sequence[Conversation], encoder: Encoder, left_out: dict[str, list[str]]
) -> Iterator[tuple[str, Labelled]]:
    """Yield each conversation that can be rendered, tokenized and labelled.

    Raises:
        DataError: The template rejects conversations; they are listed.
    """
    tokenizer = encoder.tokenizer
    refused: list[str] = []
    for begin in range(0, len(conversations), _BATCH):
        batch: list[tuple[str, Rendered]] = []
        for conversation in conversations[begin : begin + _BATCH]:
            source = conversation.source
            said = "\0".join(texts(conversation.messages))
            if any(mark in said for mark in (BEGIN, END, MARK)):
                refused.append(f"{source}: it holds the code points U+10FFF0 to U+10FFF2")
                continue
            if not encoder.keeps_special and tokenizer.spells_special.search(said):
                left_out.setdefault(SPELLS_SPECIAL, []).append(source)
                continue
            try:
                batch.append((source, render(encoder.template, conversation)))
            except TemplateRefusal as refusal:
                refused.append(f"{source}: the chat template rejects it: {refusal}")
        if refused:
            continue
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


def _sha256(path: str) -> str:
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
