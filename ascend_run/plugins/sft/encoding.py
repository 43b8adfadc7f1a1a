"""Files of conversations as token ids with their labels: encoded once, kept in the cache folder.

Cost: rendering and tokenising, half a millisecond for 300 tokens, once for a set of files; then
the arrays are mapped into memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from ascend_run.plugin_api import DataError, StorageError

from .chat_tokenizer import ChatTokenizer
from .conversations import SHOWN_PROBLEMS, Conversation, read_conversations, texts
from .labelling import Labelled, label
from .templates import BEGIN, END, MARK, ChatTemplate, TemplateRefusal
from .turns import Rendered, render

_FORMAT: Final = 1
_BATCH: Final = 512
"""Conversations that are tokenised together."""
_NAMED: Final = 5
"""Of the conversations that were left out for one reason, as many are named."""

NOTHING_TO_TRAIN: Final = "nothing to train on"
TOO_LONG: Final = "too long"
TRUNCATED: Final = "truncated"
SPELLS_SPECIAL: Final = "spells a special token"


@attrs.frozen(kw_only=True)
class Encoder:
    """How conversations become samples."""

    tokenizer: ChatTokenizer
    template: ChatTemplate
    max_tokens: int
    """Of a conversation; one more than ``data.seq_length``, since the last one is only a label."""
    truncates: bool
    keeps_special: bool

    def description(self, files: Sequence[str]) -> Mapping[str, Any]:
        """Everything that decides the result."""
        return {
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
    """Samples one after the other."""

    ids: np.ndarray[Any, Any]
    """[tokens] int32."""
    trained: np.ndarray[Any, Any]
    """[tokens] bool."""
    ends: np.ndarray[Any, Any]
    """[samples] int64: where each sample ends in ``ids``."""
    report: Mapping[str, Any]
    """``conversations`` read, and for each reason ``count`` and ``first`` (``file:line``)."""

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


def encoded_files(files: Sequence[str], encoder: Encoder, cache: Path) -> Encoded:
    """The samples of some files, from the cache where they were encoded before.

    The first process to come encodes; others that share the folder wait for it.

    Raises:
        DataError: Lines that cannot be used, or conversations that the template refuses, all of
            them; or no sample is left.
        StorageError: The cache folder cannot be written.
    """
    key = json.dumps(encoder.description(files), sort_keys=True)
    folder = cache / f"sft-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _publish(_encode(files, encoder), folder)
        return _load(folder)
    except OSError as error:
        raise StorageError(
            f"the encoded conversations cannot be kept in {cache}: {error.strerror or error}; "
            "point data.cache_dir elsewhere"
        ) from None


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
        # The first token is no label of any.
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
            list(told(report)),
        )
    return Encoded(
        ids=np.concatenate(ids),
        trained=np.concatenate(trained),
        ends=np.cumsum([len(part) for part in ids]).astype(np.int64),
        report=report,
    )


def told(report: Mapping[str, Any]) -> Iterator[str]:
    """What was left out, a sentence a reason."""
    for reason, which in report["left_out"].items():
        more = which["count"] - len(which["first"])
        rest = f" and {more} more" if more else ""
        yield f"{reason}: {which['count']} ({', '.join(which['first'])}{rest})"


def _labelled(
    conversations: Sequence[Conversation], encoder: Encoder, left_out: dict[str, list[str]]
) -> Iterator[tuple[str, Labelled]]:
    """Each conversation that is text, tokenised.

    Raises:
        DataError: With the conversations that the template refuses.
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
                refused.append(f"{source}: the chat template refuses it: {refusal}")
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
            shown.append(f"{len(refused) - len(shown)} more conversations are refused")
        raise DataError(f"{encoder.template.name} does not suit these conversations", shown)


def _publish(encoded: Encoded, folder: Path) -> None:
    """Write beside, and rename when whole."""
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name in ("ids", "trained", "ends"):
            np.save(beside / f"{name}.npy", getattr(encoded, name), allow_pickle=False)
        (beside / "report.json").write_text(json.dumps(encoded.report), encoding="utf-8")
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _load(folder: Path) -> Encoded:
    arrays = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        for name in ("ids", "trained", "ends")
    }
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return Encoded(**arrays, report=report)


def _sha256(path: str) -> str:
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
