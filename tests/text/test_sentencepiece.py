"""SentencePiece models against the sentencepiece library itself, which encodes the same texts."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from ascend_run.plugin_api import DataError
from ascend_run.text.chat_tokenizer import load_chat_tokenizer, read_tokenizer_config
from ascend_run.text.fields import RewardTokens
from ascend_run.text.tokenizer import TextTokenizer, load_tokenizer
from tests.support.chats import CHATML

WORDS = ("alpha", "beta", "gamma", "the", "there", "über", "日本", "don't", "x=1", "foo_bar")
FORMS: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "llama": {
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "gemma": {
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<sep>", "\n\n"],
    },
    "symbols and prefix": {"user_defined_symbols": ["<sep>"]},
    "symbols, prefix and bytes": {
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<sep>", "<sep>a", "\n\n"],
    },
    "symbols, prefix and spaces": {
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<sep>", "▁▁", "日"],
    },
}
TEXTS = st.lists(
    st.sampled_from(
        [*"abgmtxü日 \n\t'=_1Qé<s>/ﬁ▁", "<s>", "</s>", "<sep>", "\n\n", "alpha", " the"]
    ),
    max_size=20,
).map("".join)


def write_model(path: Path, algorithm: str = "bpe", **options: Any) -> Path:
    """Train a tiny model."""
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(3, 12))) for _ in range(500)]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=written,
        model_type=algorithm,
        vocab_size=400 if options.get("byte_fallback") else 110,
        character_coverage=1.0,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(written.getvalue())
    return path


@pytest.fixture(scope="module", params=FORMS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TextTokenizer, sentencepiece.SentencePieceProcessor]:
    """Ours and the library's."""
    options = FORMS[request.param]
    path = write_model(tmp_path_factory.mktemp("model") / "tokenizer.model", **options)
    return load_tokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path))


@given(text=TEXTS)
@example(text="  alpha  beta ")
@example(text="\n")
@example(text="<s>alpha</s>")
@example(text="<sep>")
@example(text="\ufdd0")  # the mark of symbols, which is no character
@example(text="\ufdd0<sep>a\ufdd0<sep>")
@example(text=" <sep> ")
@example(text="<sep><sep>a")
@example(text="a\n alpha \n")
def test_any_text_has_the_librarys_ids(
    both: tuple[TextTokenizer, sentencepiece.SentencePieceProcessor], text: str
) -> None:
    ours, library = both
    ids = ours.encoder.encode([text])[0].tolist()
    assert ids == library.encode(text)
    assert ours.decode(ids) == library.decode(ids) or library.unk_id() in ids


def test_the_end_and_the_size_are_the_models(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tokenizer.model")
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for place in (path, tmp_path):
        ours = load_tokenizer(place)
        assert (ours.vocab_size, ours.eod) == (library.vocab_size(), library.eos_id())


def test_a_symbol_has_one_id_by_its_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tokenizer.model", user_defined_symbols=["<sep>", "<end>"])
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    size = library.vocab_size()
    added = {str(size + n): {"content": text} for n, text in enumerate(("<one>", "<two>"))}
    config = {"eos_token": "<end>", "chat_template": CHATML, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    chat = load_chat_tokenizer(tmp_path, read_tokenizer_config(tmp_path))

    assert (chat.eos_id, chat.vocab_size) == (library.piece_to_id("<end>"), size + 2)
    ids = [library.piece_to_id("<sep>"), size + 1, chat.eos_id]
    assert chat.backend.decode(ids, skip_special_tokens=False) == "<sep><two><end>"
    encoded = chat.backend.encode("<two>alpha<sep>", add_special_tokens=False).ids
    assert encoded == [size + 1, *library.encode("alpha<sep>")]
    ratings = RewardTokens.of(chat, "<sep>", ["<one>", "<end>"])  # single tokens, with a prefix
    assert (ratings.placeholder, ratings.ids) == (ids[0], {"<one>": size, "<end>": chat.eos_id})


def test_tokens_of_the_config_are_added_and_split_a_conversation(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tokenizer.model", **FORMS["llama"])
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    size = library.vocab_size()
    added = {1: "<s>", size: "<|im_start|>", size + 1: "<|im_end|>"}
    config = {
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
        "added_tokens_decoder": {str(n): {"content": text} for n, text in added.items()},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    chat = load_chat_tokenizer(tmp_path, read_tokenizer_config(tmp_path))

    assert (chat.eos_id, chat.vocab_size) == (size + 1, size + 2)
    ids = chat.backend.encode("<|im_start|>the beta<|im_end|>", add_special_tokens=False).ids
    assert ids == [size, *library.encode("the beta"), size + 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no pieces"),
        (b"not a model at all", "is not a SentencePiece model"),
        ("unigram", "its algorithm is unigram, expected bpe; save a tokenizer.json instead"),
        ("suffix", "white space is a suffix of its pieces"),
        ("gap", "the added token '<new>' has id 500, but the next id is"),
    ],
)
def test_what_cannot_be_used_is_one_message(
    tmp_path: Path, content: bytes | str, message: str
) -> None:
    path = tmp_path / "tokenizer.model"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "gap":
        write_model(path)
        config = {"added_tokens_decoder": {"500": {"content": "<new>"}}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    elif content == "suffix":
        write_model(path, treat_whitespace_as_suffix=True)
    else:
        write_model(path, content)

    with pytest.raises(DataError) as refused:
        load_tokenizer(tmp_path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)
