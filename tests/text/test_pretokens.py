"""Texts encoded by their pre-tokens, against the tokenizers library encoding them as a whole."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from ascend_run.text import pretokens
from ascend_run.text.documents import DocumentEncoder
from ascend_run.text.pretokens import splitter_of
from ascend_run.text.split_pattern import SplitPattern
from ascend_run.text.tokens import TokenEncoder

GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3: Final = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
O200K: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL: Final = ("<|a|>", "<|a|>b", "<|end|>")
TRAINED_ON: Final = (
    "the fox's tail, don't 日本語 über 12345\n\n",
    "x = [1, 2]\r\n\tif x: return",
) * 9
PIECES: Final = (
    *"'sStTlLreRE \n\r\t\u017f\u212a\x1c\x85\u00a0éaé1Ⅷ٣日本\U0001f642ß",
    *"\u0301.!_/-AB\u2028\U0001d400",
    *("<|a|>", "<|end|>", "<tool>", "the ", " fox", "don't", "  ", "\n\n", "123", "\u0344"),
)
TEXTS: Final = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)


def trained(pattern: str | None, *tokens: AddedToken, **steps: Any) -> str:
    """Return the tokenizer.json of a small byte-level tokenizer."""
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    backend.pre_tokenizer = byte_level
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    for name, step in steps.items():
        setattr(backend, name, step)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TRAINED_ON, trainer)
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([*tokens])
    return str(backend.to_str())


TOOL: Final = AddedToken("<tool>", normalized=False)
TRIMMING: Final = processors.ByteLevel(trim_offsets=True)
TOKENIZERS: Final[Mapping[str, str]] = {
    "gpt2": trained(None),
    "qwen2": trained(QWEN2, TOOL, normalizer=normalizers.NFC()),
    "llama3": trained(LLAMA3, post_processor=processors.Sequence([TRIMMING])),
    "o200k": trained(O200K, TOOL, post_processor=processors.ByteLevel(trim_offsets=False)),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def encoders(request: pytest.FixtureRequest) -> tuple[DocumentEncoder, TokenEncoder, Tokenizer]:
    """Ours for documents and for conversations, and the library's."""
    content = TOKENIZERS[request.param]
    library = Tokenizer.from_str(content)
    return DocumentEncoder(content), TokenEncoder(library, json.loads(content)), library


@given(texts=st.lists(TEXTS, max_size=4))
@example(texts=[" <|a|>b the  fox's", "", " ", "<|end|>", "<tool> \U0001f642", "\U00020000"])
def test_ids_and_places_are_those_of_the_library(
    encoders: tuple[DocumentEncoder, TokenEncoder, Tokenizer], texts: list[str]
) -> None:
    documents, conversations, library = encoders
    plain = documents.backend.encode_batch(texts, add_special_tokens=False)
    assert [ids.tolist() for ids in documents.encode(texts)] == [found.ids for found in plain]
    marked = library.encode_batch(texts, add_special_tokens=False)
    for text, tokens, found in zip(texts, conversations.encode(texts), marked, strict=True):
        assert tokens.ids == found.ids
        for begin in range(len(text)):
            span = (begin, min(len(text), begin + 1 + begin % 5))
            holding = [
                index
                for index, (first, end) in enumerate(found.offsets)
                if end > span[0] and first < span[1]
            ]
            assert [*tokens.inside(span)] == holding
        spaces = [text[first:end].isspace() for first, end in found.offsets]
        assert [tokens.is_space(index) for index in range(len(found.ids))] == spaces


@pytest.mark.parametrize("pattern", [GPT2, QWEN2, LLAMA3, O200K])
def test_every_character_is_split_as_in_the_library(pattern: str) -> None:
    """Each character stands between letters, digits and spaces."""
    split, library = SplitPattern(pattern), pre_tokenizers.Split(Regex(pattern), "isolated")
    numbers = [n for n in range(0x20000) if not 0xD800 <= n < 0xE000]
    chance = random.Random(0)
    for begin in range(0, len(numbers), 2000):
        text = "".join(
            chance.choice(("a", " ", "1", "\n", ".")) + chr(n)
            for n in numbers[begin : begin + 2000]
        )
        want = [part for part, _ in library.pre_tokenize_str(text)]
        got = split.split(text)
        assert got == want or (got is None and max(text) >= "\U00010000")
    assert split.split("a" + chr(sys.maxunicode)) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}),
        ("pre_tokenizer", None),
        ("normalizer", {"type": "Lowercase"}),
        ("post_processor", {"type": "RobertaProcessing", "sep": ["</s>", 0], "cls": ["<s>", 1]}),
    ],
)
def test_another_kind_of_tokenizer_is_left_to_the_library(key: str, value: object) -> None:
    values = json.loads(TOKENIZERS["gpt2"])
    assert splitter_of(values, special_as_text=True) is not None
    assert splitter_of({**values, key: value}, special_as_text=True) is None


@pytest.mark.parametrize("pattern", [r"\d+|\D+", r"(a)|b", r"[a&&b]", r"\p{Han}+", r".+", r"a{2}+"])
def test_a_pattern_that_the_two_may_read_differently_is_not_translated(pattern: str) -> None:
    assert not SplitPattern(pattern).is_supported()


def test_the_cache_is_emptied_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretokens, "_MOST_BYTES", 1000)
    encoder = DocumentEncoder(TOKENIZERS["qwen2"])
    texts = ["the fox and the dog", "one two three four five six", "the dog"]
    for text in texts:
        (ids,) = encoder.encode([text])
        assert encoder.backend.decode(ids.tolist()) == text
