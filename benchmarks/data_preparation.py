"""Time to tokenize: plain text against Megatron's way, conversations against transformers'."""

from __future__ import annotations

import json
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from ascend_run.text.indexed import read_index
from ascend_run.text.sample_files import field_prefix

from .data_worker import digest_of
from .protocol import Benchmark, NotMeasured, Settings, alternating, device, run, worker
from .rows import Row, compared

TEXT_ROW: Final = "preprocess, plain text vs Megatron's preprocess_data"
CHAT_ROW: Final = "preprocess, conversations vs apply_chat_template"
GOALS: Final = {TEXT_ROW: 3.0, CHAT_ROW: 1.5}
ASCEND_RUN: Final = (sys.executable, "-m", "ascend_run")
VOCABULARY: Final = 8192
TEXT_BYTES: Final = 12_000_000
CONVERSATIONS: Final = 8_000
_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>\n' }}{% endfor %}"
)


def benchmarks() -> list[Benchmark]:
    """One row for documents and one for conversations."""
    return [
        Benchmark(name=TEXT_ROW, goal=f">= {GOALS[TEXT_ROW]:g} x", measure=_measure_text),
        Benchmark(name=CHAT_ROW, goal=f">= {GOALS[CHAT_ROW]:g} x", measure=_measure_chat),
    ]


def _measure_text(settings: Settings) -> Row:
    """Both write the same token files, of which every byte is compared."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = write_corpus(folder)
        ours = ["--input", folder / "text.jsonl", "--output-prefix", folder / "ours"]
        ours += ["--tokenizer", folder / "tokenizer/tokenizer.json", "--end-token", "<|im_end|>"]
        theirs = ["text", folder / "text.jsonl", folder / "tokenizer", folder / "theirs"]
        row = _compared(settings, TEXT_ROW, ours, theirs, f"{documents:,} files of Python's source")
        for suffix in (".bin", ".idx"):
            contents = [(folder / f"{who}{suffix}").read_bytes() for who in ("ours", "theirs")]
            if contents[0] != contents[1]:
                raise NotMeasured(f"the two {suffix} files differ")
        return row


def _measure_chat(settings: Settings) -> Row:
    """Ours also labels the turns, hashes and writes what the peer leaves in memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        ours = ["--input", folder / "chats.jsonl", "--output-prefix", folder / "ours"]
        ours += ["--tokenizer", folder / "tokenizer", "--handler", "sharegpt"]
        theirs = ["chat", folder / "chats.jsonl", folder / "tokenizer", folder / "theirs"]
        row = _compared(settings, CHAT_ROW, ours, theirs, f"{CONVERSATIONS:,} conversations")
        require_equal_ids(folder)
        return row


def require_equal_ids(folder: Path) -> None:
    """Compare the ids of the conversations that both wrote into a folder.

    Raises:
        NotMeasured: An id differs, or a conversation's end.
    """
    theirs = json.loads((folder / "theirs.json").read_text())["digest"]
    index = read_index(field_prefix(folder / "ours", "input_ids"))
    written = np.split(index.ids(), np.cumsum(index.lengths)[:-1])
    if digest_of(ids.tolist() for ids in written) != theirs:
        raise NotMeasured("the token ids of the conversations differ")


def _compared(settings: Settings, name: str, ours: list[Any], theirs: list[Any], what: str) -> Row:
    def of_ours() -> float:
        return float(json.loads(_preprocess([*ours, "--overwrite"]))["seconds"])

    def of_peer() -> float:
        return float(worker("data_worker", *theirs)["seconds"])

    mine, peer = alternating(settings, of_ours, of_peer, name)
    return compared(
        name=name,
        ours=mine,
        peer=peer,
        unit="s",
        goal=GOALS[name],
        note=f"{what}, without the imports of either; equal token ids",
        device=device(),
        larger_is_better=False,
    )


def _preprocess(words: list[Any]) -> str:
    return run([*ASCEND_RUN, "preprocess", *words, "--json"]).stdout


def write_corpus(folder: Path) -> int:
    """Write documents, conversations and a tokenizer for both; return the number of documents."""
    texts = [*_texts(TEXT_BYTES)]
    _write_lines(folder / "text.jsonl", ({"text": text} for text in texts).__iter__)
    pieces = [line.strip() for text in texts for line in text.split("\n") if len(line) > 30]
    _write_lines(folder / "chats.jsonl", lambda: _conversations(pieces))
    tokenizer = folder / "tokenizer"
    train = ["--input", folder / "text.jsonl", "--output-prefix", folder / "trained"]
    run([*ASCEND_RUN, "preprocess", *train, "--train-tokenizer", str(VOCABULARY),
        "--tokenizer-out", tokenizer / "tokenizer.json"])  # fmt: skip
    _add_markers(tokenizer / "tokenizer.json")
    config = {"eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    return len(texts)


def _texts(limit: int) -> Any:
    """Source files of Python's library, each text once."""
    size, seen = 0, set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        key = " ".join(text.split())
        if "site-packages" in path.parts or not key or key in seen:
            continue
        seen.add(key)
        size += len(text)
        if size > limit:
            return
        yield text


def _conversations(pieces: list[str]) -> Any:
    """Two turns each, of lines of the source."""
    for i in range(CONVERSATIONS):
        asked, answered = pieces[4 * i : 4 * i + 2], pieces[4 * i + 2 : 4 * i + 4]
        yield {
            "conversations": [
                {"from": role, "value": text}
                for pair in zip(asked, answered, strict=True)
                for role, text in zip(("human", "gpt"), pair, strict=True)
            ]
        }


def _write_lines(path: Path, records: Callable[[], Any]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in records())


def _add_markers(path: Path) -> None:
    """Add the template's special tokens to a trained tokenizer."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(path))
