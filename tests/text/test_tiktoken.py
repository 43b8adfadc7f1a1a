"""tiktoken files against the tiktoken library itself, which encodes the same texts."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import tiktoken
from hypothesis import example, given

from ascend_run.plugin_api import DataError
from ascend_run.text.chat_tokenizer import load_chat_tokenizer, read_tokenizer_config
from ascend_run.text.tiktoken_model import FAMILIES
from ascend_run.text.tokenizer import TextTokenizer, load_tokenizer
from tests.support.chats import CHATML
from tests.text.test_pretokens import TEXTS, TOKENIZERS
from tests.text.test_sentencepiece import write_model

CONFIGS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "qwen": ("qwen.tiktoken", {}),
    "llama3": ("tokenizer.model", {"model_type": "llama"}),
    "glm4": ("tokenizer.model", {"tokenizer_class": "ChatGLM4Tokenizer"}),
    "kimi": ("tiktoken.model", {"tokenizer_class": "TikTokenTokenizer"}),
    "own": ("tokenizer.model", {"pat_str": r"\p{L}+|\s+|[^\s\p{L}]+"}),
}


def tokens_of() -> list[bytes]:
    """Return byte tokens, and some that a trained tokenizer joins them to."""
    joined = [
        "  ",
        "    ",
        "aa",
        "aaa",
        "aaaa",
        " th",
        "the",
        " the",
        "fox",
        "日",
        "日本",
        "'s",
        "12",
    ]
    alphabet = [bytes([byte]) for byte in range(256)]
    middle = [b"th", b" t", b"fo", "日".encode()[:2]]
    return [*alphabet, *middle, *(text.encode() for text in joined)]


def write_tiktoken(
    path: Path, config: Mapping[str, Any], tokens: list[bytes] | None = None
) -> Path:
    """Write a tiktoken file beside the model's config."""
    ranks = enumerate(tokens_of() if tokens is None else tokens)
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % n for n, t in ranks))
    name = "config.json" if "model_type" in config else "tokenizer_config.json"
    (path.parent / name).write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module", params=CONFIGS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TextTokenizer, tiktoken.Encoding]:
    """Ours and the library's."""
    name, config = CONFIGS[request.param]
    path = write_tiktoken(tmp_path_factory.mktemp("model") / name, config)
    family = "QWenTokenizer" if request.param == "qwen" else next(iter(config.values()))
    pattern = FAMILIES[family].pattern if family in FAMILIES else family
    ranks = {token: rank for rank, token in enumerate(tokens_of())}
    library = tiktoken.Encoding(
        request.param, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    )
    return load_tokenizer(path.parent), library


@given(text=TEXTS)
@example(text="aaaaa       aaaaaaa the the  fox's 日本 123456")
def test_any_text_has_the_librarys_ids(
    both: tuple[TextTokenizer, tiktoken.Encoding], text: str
) -> None:
    ours, library = both
    if library.name == "qwen":
        text = unicodedata.normalize("NFC", text)
    ids = ours.encoder.encode([text])[0].tolist()
    assert ids == library.encode(text, disallowed_special=())
    assert ours.decode(ids) == text


def test_qwen_normalizes_texts(tmp_path: Path) -> None:
    ours = load_tokenizer(write_tiktoken(tmp_path / "qwen.tiktoken", {}))
    decomposed, composed = ours.encoder.encode(["s\u0301", "\u015b"])
    assert decomposed.tolist() == composed.tolist()


def test_qwen_has_its_special_tokens_and_others_those_of_the_config(tmp_path: Path) -> None:
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    first = len(tokens_of())
    folder = write_tiktoken(tmp_path / "qwen.tiktoken", config).parent
    chat = load_chat_tokenizer(folder, read_tokenizer_config(folder))
    assert (chat.eos_id, chat.vocab_size) == (first + 2, first + 3 + 205)
    (tokens,) = chat.tokens.encode(["<|im_start|>the fox<|im_end|>"])
    assert (tokens.ids[0], tokens.ids[-1]) == (first + 1, first + 2)

    added = {str(first + 3): {"content": "<|im_end|>"}, "37": {"content": "%"}}
    values = {**config, "tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": added}
    (tmp_path / "qwen.tiktoken").rename(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    chat = load_chat_tokenizer(folder, read_tokenizer_config(folder))
    assert (chat.eos_id, chat.vocab_size) == (first + 3, first + 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"YQ== 0\nnot base64 1\n", ":2: expected a token in base64 and its rank"),
        (b"YQ== 0\nYg== 2\n", "has no rank 1; ranks must be contiguous from 0"),
        (b"YQ== 0\n", "has no token for 255 of the 256 bytes"),
        (None, "and the tokenizer_class None is not known (QWenTokenizer, ChatGLM4Tokenizer"),
    ],
)
def test_what_cannot_be_used_is_one_message(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = write_tiktoken(tmp_path / "tokenizer.model", {})
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as refused:
        load_tokenizer(tmp_path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_special_token_with_the_id_of_another_token_is_refused(tmp_path: Path) -> None:
    """One message names all; the id of the token with the same bytes is no error."""
    added = {n: {"content": text} for n, text in (("5", "<a>"), ("37", "%"), ("40", "<b>"))}
    config = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": added}
    path = write_tiktoken(tmp_path / "tokenizer.model", config)
    with pytest.raises(DataError) as refused:
        load_tokenizer(tmp_path)
    found = str(refused.value)
    assert f"{path}: added_tokens_decoder has ids of other tokens: 5 is '<a>'" in found
    assert "40 is '<b>'" in found
    assert "'%'" not in found
    assert f"ids from {len(tokens_of())} on" in found


def test_the_file_that_is_named_is_read_also_by_conversations(tmp_path: Path) -> None:
    """A folder has both; its tokenizer.json comes first, unless the other one is named."""
    from ascend_run.text.opening import ChatOptions, open_chat

    (tmp_path / "tokenizer.json").write_text(TOKENIZERS["gpt2"])
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": CHATML})
    )
    model = write_model(tmp_path / "tokenizer.model")

    def opened(path: Path) -> Any:
        options = dict.fromkeys(("tokenizer_option", "template_option", "date_option"), "t")
        return open_chat(ChatOptions(tokenizer=path, **options))[0]

    named = opened(model)
    assert named.vocab_size == load_tokenizer(model).vocab_size
    with pytest.raises(DataError, match="names no eos_token of the vocabulary"):
        opened(tmp_path)
