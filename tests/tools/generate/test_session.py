"""Texts of sequences, from a forward that gives the ids of a script."""

from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from ascend_run.ops.generation.engine import Engine, Finish, Request
from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.step import Step
from ascend_run.text.tokenizer import train_tokenizer
from ascend_run.tools.generate.session import Piece, Session
from ascend_run.tools.generate.texts import Texts

TOKENIZER = train_tokenizer(["foxes"], 257)  # bytes, and the end of a document
TOKENIZER.backend.encode_special_tokens = False  # as for prompts
CACHE_TOKENS = 256


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.backend.encode(text).ids
    return found


class Script:
    """The first id of a prompt names what follows."""

    def __init__(self, *texts: str) -> None:
        self.follows = [ids(text) for text in texts]
        self.names: dict[int, int] = {}
        self.num_rows: list[int] = []

    def __call__(self, step: Step) -> Tensor:
        self.num_rows.append(len(step.rows_R))
        logits_RV = torch.zeros(len(step.parts), TOKENIZER.vocab_size)
        for row, part in enumerate(step.parts):
            name = self.names.setdefault(part.sequence, int(step.tokens_T[part.first]))
            logits_RV[row, self.follows[name][part.start + part.count - 1]] = 1
        return logits_RV


@pytest.fixture
def cache() -> KeyValueCache:
    return KeyValueCache(CACHE_TOKENS)


def session(cache: KeyValueCache, *texts: str) -> tuple[Session, Script]:
    script = Script(*texts)
    known = Texts(tokenizer=TOKENIZER, end_ids=frozenset(), path=Path("of no file"))
    return Session(Engine(script, cache), known), script


def ask(name: int, max_new_tokens: int) -> Request:
    return Request(prompt=(name,), max_new_tokens=max_new_tokens)


def run(one: Session) -> list[Piece]:
    pieces = []
    while not one.is_idle:
        pieces += one.step()
    return pieces


def test_a_stop_word_ends_its_sequence_at_once(cache: KeyValueCache) -> None:
    one, script = session(cache, "a fox is here", "no end")
    stopped, other = one.submit(ask(0, 13), ["fox"]), one.submit(ask(1, 6), ["x"])
    pieces = run(one)
    assert script.num_rows == [2] * 5 + [1]  # five letters, and then it is alone
    for number, text, finish in ((stopped, "a ", Finish.STOP), (other, "no end", Finish.LENGTH)):
        mine = [piece for piece in pieces if piece.emitted.sequence == number]
        assert "".join(piece.text for piece in mine) == text
        assert [piece.finish for piece in mine if piece.finish] == [finish]
    assert cache.free_tokens == CACHE_TOKENS


def test_what_is_held_back_comes_with_the_last_token(cache: KeyValueCache) -> None:
    one, _ = session(cache, "it is a fo")
    one.submit(ask(0, 10), ["fox"])
    assert [piece.text for piece in run(one)] == [*"it is a ", "", "fo"]


def test_a_stop_word_that_is_a_special_token_ends_by_its_id(cache: KeyValueCache) -> None:
    one, _ = session(cache, "ab<|endoftext|>cd", "ab<|endoftext|>cd")
    stopped = one.submit(ask(0, 5), ["<|endoftext|>"])
    other = one.submit(ask(1, 5))
    texts = {stopped: "", other: ""}
    for piece in run(one):
        texts[piece.emitted.sequence] += piece.text
    assert texts == {stopped: "ab", other: "abcd"}


def test_an_ended_sequence_gives_what_was_withheld_and_is_resumed(cache: KeyValueCache) -> None:
    one, _ = session(cache, "it is a fox")
    number = one.submit(attrs.evolve(ask(0, 11), is_kept=True), ["fox"])
    assert "".join(one.step()[0].text for _ in range(10)) == "it is a "
    assert one.end(number) == "fo"
    assert (one.end(number), one.is_idle) == ("", True)
    request = Request(prompt=(0, *ids("it is a f")), max_new_tokens=2, is_kept=True)
    one.resume(number, request, ["?"])
    assert [piece.text for piece in run(one)] == ["o", "x"]
    assert one.num_cached(number) == 9
    one.cancel(number)
    assert cache.free_tokens == CACHE_TOKENS


def test_a_stop_word_keeps_the_tokens_of_a_request_that_wants_it(cache: KeyValueCache) -> None:
    one, _ = session(cache, "a fox is here")
    number = one.submit(attrs.evolve(ask(0, 13), is_kept=True), ["fox"])
    run(one)
    assert cache.free_tokens == CACHE_TOKENS - 16
    one.resume(number, attrs.evolve(ask(0, 2), is_kept=True))
    run(one)
    assert one.num_cached(number) == 0, "the last token of a prompt is computed"
    one.cancel(number)
    assert cache.free_tokens == CACHE_TOKENS


def test_a_cancelled_sequence_gives_no_more(cache: KeyValueCache) -> None:
    one, _ = session(cache, "abcd")
    number = one.submit(ask(0, 4))
    assert [piece.text for piece in one.step()] == ["a"]
    one.cancel(number)
    assert one.is_idle
    assert one.step() == []
    assert cache.free_tokens == CACHE_TOKENS
