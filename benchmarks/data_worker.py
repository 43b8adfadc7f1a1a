"""Tokenize as the peers do; prints one JSON line with the seconds of the work, without imports.

``text``: as Megatron's ``tools/preprocess_data.py``: a pool of processes, each with a transformers
tokenizer, one document a call, in chunks of 32; the parent writes with Megatron's builder.
``chat``: one call of ``apply_chat_template`` a conversation, as fine-tuning scripts do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .protocol import THREADS

_CHUNK = 32
_ROLES = {"human": "user", "gpt": "assistant"}
_tokenizer: Any = None
"""Of a process of the pool, as the tool keeps it."""


def load(folder: Path) -> Any:
    """Return transformers' tokenizer."""
    from transformers import PreTrainedTokenizerFast

    config = json.loads((folder / "tokenizer_config.json").read_text())
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **config)


def prepare(folder: Path) -> None:
    """Initializer of a process of the pool."""
    global _tokenizer
    _tokenizer = load(folder)


def encode(line: str) -> list[int]:
    """Return the ids of a document, with the end."""
    ids: list[int] = _tokenizer(json.loads(line)["text"], add_special_tokens=False).input_ids
    return [*ids, _tokenizer.eos_token_id]


def text(source: Path, folder: Path, target: Path) -> float:
    """Write Megatron's token files; return the seconds."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    begun = time.perf_counter()
    with source.open(encoding="utf-8") as lines:
        pool = multiprocessing.Pool(THREADS, initializer=prepare, initargs=(folder,))
        builder = IndexedDatasetBuilder(f"{target}.bin", dtype=np.uint16)
        for ids in pool.imap(encode, lines, _CHUNK):
            builder.add_document(torch.tensor(ids), [len(ids)])
        builder.finalize(f"{target}.idx")
        pool.close()
        pool.join()
    return time.perf_counter() - begun


def chat(source: Path, folder: Path, target: Path) -> float:
    """Tokenize conversations; return the seconds, without those of the digest of the ids."""
    tokenizer = load(folder)
    encoded: list[list[int]] = []
    begun = time.perf_counter()
    with source.open(encoding="utf-8") as lines:
        for line in lines:
            messages = [
                {"role": _ROLES[turn["from"]], "content": turn["value"]}
                for turn in json.loads(line)["conversations"]
            ]
            encoded.append(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])
    seconds = time.perf_counter() - begun
    # The line break after the last turn is not trained, and so left out by the other.
    digest = digest_of(ids[:-1] for ids in encoded)
    target.with_suffix(".json").write_text(json.dumps({"digest": digest}))
    return seconds


def digest_of(conversations: Iterable[Iterable[int]]) -> str:
    """Return a hash of ids and of where each conversation ends."""
    digest = hashlib.sha256()
    for ids in conversations:
        digest.update(f"{' '.join(map(str, ids))}\n".encode())
    return digest.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("text", "chat"))
    for name in ("source", "tokenizer", "target"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    measured = {"text": text, "chat": chat}[given.what]
    print(json.dumps({"seconds": measured(given.source, given.tokenizer, given.target)}))
