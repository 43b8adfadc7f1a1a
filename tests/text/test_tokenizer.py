"""Training, loading and telling tokenizers apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.plugin_api import DataError
from ascend_run.text.tokenizer import (
    END_OF_DOCUMENT,
    TextTokenizer,
    fingerprint_of,
    load_tokenizer,
    train_tokenizer,
)

TEXTS = ["the quick brown fox", "the lazy dog", "def the_fox(dog): return dog"] * 4


@pytest.fixture(scope="module")
def trained() -> TextTokenizer:
    return train_tokenizer(TEXTS, 300)


def ids_of(tokenizer: TextTokenizer) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encoder.encode(TEXTS)]


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_survives_encoding_and_decoding(trained: TextTokenizer, text: str) -> None:
    (ids,) = trained.encoder.encode([text])
    assert trained.decode(ids) == text
    assert all(0 <= token < trained.vocab_size for token in ids)


def test_a_text_that_spells_the_end_token_does_not_end_the_document(trained: TextTokenizer) -> None:
    (ids,) = trained.encoder.encode([f"before {END_OF_DOCUMENT} after"])
    assert trained.eod == 0
    assert trained.eod not in ids


def test_a_saved_tokenizer_loads_with_the_same_ids_and_fingerprint(
    trained: TextTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(trained.to_json())
    for place in (path, tmp_path):
        loaded = load_tokenizer(place)
        assert loaded.fingerprint == trained.fingerprint
        assert (loaded.vocab_size, loaded.eod) == (trained.vocab_size, trained.eod)
        assert ids_of(loaded) == ids_of(trained)


def test_the_fingerprint_ignores_spelling_and_run_settings_but_not_tokens(
    trained: TextTokenizer,
) -> None:
    values = json.loads(trained.to_json())
    reordered = dict(reversed(values.items())) | {"truncation": None, "padding": {"pad_id": 3}}
    assert fingerprint_of(json.dumps(reordered, indent=8)) == trained.fingerprint
    values["model"]["vocab"]["!!!!"] = 299
    assert fingerprint_of(json.dumps(values)) != trained.fingerprint


def test_the_vocabulary_reaches_the_largest_id_though_some_are_unused(
    trained: TextTokenizer, tmp_path: Path
) -> None:
    values = json.loads(trained.to_json())
    values["model"]["vocab"]["!!!!"] = 999
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    assert load_tokenizer(tmp_path).vocab_size == 1000
    assert trained.vocab_size == len(trained.backend.get_vocab())


def test_leftover_truncation_and_padding_change_no_ids(
    trained: TextTokenizer, tmp_path: Path
) -> None:
    values = json.loads(trained.to_json())
    values["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(values))
    assert ids_of(load_tokenizer(path)) == ids_of(trained)


@pytest.mark.parametrize("threads", ["1", "2"])
def test_training_does_not_depend_on_threads(threads: str, trained: TextTokenizer) -> None:
    program = (
        "from ascend_run.text.tokenizer import train_tokenizer\n"
        f"print(train_tokenizer({TEXTS!r}, 300).fingerprint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RAYON_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == trained.fingerprint


def test_a_vocabulary_that_cannot_hold_every_byte_is_refused() -> None:
    with pytest.raises(DataError, match="at least 257"):
        train_tokenizer(TEXTS, 256)


def test_the_end_token_is_found_named_or_refused(trained: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    values = json.loads(trained.to_json())
    values["added_tokens"][0]["content"] = "<stop>"
    vocabulary = values["model"]["vocab"]
    values["model"]["vocab"] = {"<stop>": vocabulary.pop(END_OF_DOCUMENT), **vocabulary}
    path.write_text(json.dumps(values))
    assert load_tokenizer(path).eod is None
    assert load_tokenizer(path, "<stop>").eod == 0
    with pytest.raises(DataError, match="no token '<end>'"):
        load_tokenizer(path, "<end>")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        (b"", "is not a tokenizer.json"),
        (b"[]", "is not a tokenizer.json"),
        (b'{"model": {}}', "is not a tokenizer.json"),
        (b"\xff\xfe", "cannot read"),
    ],
)
def test_what_is_no_tokenizer_is_refused_by_name(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as refusal:
        load_tokenizer(path)
    assert str(path) in str(refusal.value)
