"""Text of tokens as they come, against the text of all of them."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from ascend_run.text.generated_text import GeneratedText
from ascend_run.text.tokenizer import train_tokenizer

BYTES = train_tokenizer(["the quick brown fox, 雪が降る, naïve café 🦊"] * 3, 320).backend
PIECES = Tokenizer(
    models.WordLevel(
        {"\u2581the": 0, "\u2581fox": 1, "es": 2, "<s>": 3, "<0xC3>": 4, "<0xA9>": 5}, "es"
    )
)
PIECES.decoder = decoders.Sequence(
    [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1, right=0),
    ]
)
PIECES.add_special_tokens([AddedToken("<s>", special=True)])
LETTERS_OF_ALL_WIDTHS = "f \ufffdé雪🦊"
IDS = st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=12)


def pieces(
    backend: Tokenizer, prompt: Sequence[int], new: Sequence[int], stop: Sequence[str] = ()
) -> list[str]:
    text = GeneratedText(backend, prompt, stop)
    return [*(text.push(token) for token in new), text.finish()]


@given(st.text(LETTERS_OF_ALL_WIDTHS, max_size=8), IDS)
def test_pieces_together_are_the_text_of_all_tokens(prompt: str, new: list[int]) -> None:
    ids = BYTES.encode(prompt).ids
    got = pieces(BYTES, ids, new)
    assert "".join(got) == BYTES.decode([*ids, *new])[len(BYTES.decode(ids)) :]


@given(st.text(LETTERS_OF_ALL_WIDTHS, max_size=12))
def test_only_whole_characters_are_passed_on(text: str) -> None:
    got = pieces(BYTES, [], BYTES.encode(text).ids)
    assert "".join(got) == text
    assert got[-1] == "" or text.endswith("\ufffd")


@pytest.mark.parametrize(
    ("prompt", "new", "want"),
    [
        ([0], [1, 2, 0], [" fox", "es", " the", ""]),
        ([], [1, 2, 0], ["fox", "es", " the", ""]),
        ([3], [3, 1, 3, 1], ["", "fox", "", " fox", ""]),
        ([0, 3], [1], [" fox", ""]),
        ([0], [4, 5, 2], ["", "é", "es", ""]),
        ([0], [4], ["", "\ufffd"]),
        ([0, 4], [5, 2], ["", "\ufffdes", ""]),
    ],
    ids=["spaces", "first", "special", "special-prompt", "bytes", "half", "half-prompt"],
)
def test_spaces_special_tokens_and_bytes(
    prompt: list[int], new: list[int], want: list[str]
) -> None:
    assert pieces(PIECES, prompt, new) == want


def until_stop(text: str, stop: Sequence[str]) -> str:
    """Read character by character, as a stop word is defined."""
    for end in range(1, len(text) + 1):
        if found := [word for word in stop if text[:end].endswith(word)]:
            return text[: end - len(max(found, key=len))]
    return text


LETTERS = Tokenizer(
    models.WordLevel(
        {word: at for at, word in enumerate(["a", "b", "ab", "ba", "aab", "aba"])}, "a"
    )
)
LETTERS.decoder = decoders.Fuse()
WORDS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.lists(st.integers(0, 5), max_size=10), WORDS)
@example([5], ["aba", "b"])
def test_text_ends_before_the_stop_word_that_is_complete_first(
    new: list[int], stop: list[str]
) -> None:
    want, text = until_stop(LETTERS.decode(new), stop), GeneratedText(LETTERS, [], stop)
    got = ""
    for token in new:
        got += text.push(token)
        assert want.startswith(got)
    got += text.finish()
    assert got == want
    assert text.stopped == (want != LETTERS.decode(new))


def test_a_stop_word_across_tokens_is_held_back_until_it_is_certain() -> None:
    ids = {token: BYTES.token_to_id(token) for token in ("f", "o", "x", "u")}
    stopped = [ids[letter] for letter in "ufoxu"]
    assert pieces(BYTES, [], stopped, ["fox"]) == ["u", "", "", "", "", ""]
    other = [ids[letter] for letter in "ufou"]
    assert pieces(BYTES, [], other, ["fox"]) == ["u", "", "", "fou", ""]
    assert pieces(BYTES, [], other[:3], ["fox"]) == ["u", "", "", "fo"]
