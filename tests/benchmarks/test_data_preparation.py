"""The conversations' token ids of both sides are compared, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import data_preparation, data_worker
from benchmarks.protocol import NotMeasured


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What both sides wrote of a few conversations."""
    monkeypatch.setattr(data_preparation, "TEXT_BYTES", 60_000)
    monkeypatch.setattr(data_preparation, "CONVERSATIONS", 20)
    monkeypatch.setattr(data_preparation, "VOCABULARY", 400)
    data_preparation.write_corpus(tmp_path)
    chats, tokenizer = tmp_path / "chats.jsonl", tmp_path / "tokenizer"
    ours: list[Any] = ["--input", chats, "--output-prefix", tmp_path / "ours"]
    data_preparation._preprocess([*ours, "--tokenizer", tokenizer, "--handler", "sharegpt"])
    assert data_worker.chat(chats, tokenizer, tmp_path / "theirs") > 0
    return tmp_path


def test_equal_ids_are_required(folder: Path) -> None:
    data_preparation.require_equal_ids(folder)
    bin_file = folder / "ours_packed_input_ids_document.bin"
    content = bytearray(bin_file.read_bytes())
    content[:2], content[2:4] = content[2:4], content[:2]
    bin_file.write_bytes(content)
    with pytest.raises(NotMeasured, match="the token ids of the conversations differ"):
        data_preparation.require_equal_ids(folder)


def test_a_digest_tells_ids_and_ends_apart() -> None:
    of = data_worker.digest_of
    cases = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[12], [3]], [[1, 3], [2]]]
    assert len({of(case) for case in cases}) == len(cases)
    assert of([[1, 2]]) == of(iter([(1, 2)]))
