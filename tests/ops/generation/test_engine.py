"""The engine with a forward whose next id is a function of the ids before it."""

import random
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from ascend_run.ops.generation.engine import Emitted, Engine, Finish, Request
from ascend_run.ops.generation.key_value_cache import CacheFull, KeyValueCache
from ascend_run.ops.generation.sampling import Sampling
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.ops.generation.text_lengths import TextLengths

VOCAB = 97


def next_id(ids: list[int]) -> int:
    total = 0
    for token in ids:
        total = (total * 31 + token + 1) % 10007
    return total % VOCAB


class Model:
    """Keeps the ids of each sequence, as a cache does, and the number of tokens of each step."""

    def __init__(self, *, forgets: bool = False) -> None:
        self.forgets = forgets
        self.ids: dict[int, list[int]] = {}
        self.sizes: list[int] = []

    def __call__(self, step: Step) -> Tensor:
        logits_TV = torch.zeros(len(step.tokens_T), VOCAB)
        self.sizes.append(len(step.tokens_T))
        for part in step.parts:
            ids = self.ids.setdefault(part.sequence, [])
            if part.start < len(ids) and self.forgets:  # of a sequence that is resumed
                del ids[part.start :]
            assert part.start == len(ids)
            positions = range(part.start, part.start + part.count)
            assert step.positions_T[part.rows].tolist() == [*positions]
            for row in range(part.first, part.first + part.count):
                ids.append(int(step.tokens_T[row]))
                logits_TV[row, next_id(ids)] = 1
        return logits_TV[step.rows_R]


def alone(request: Request) -> tuple[list[int], Finish]:
    ids, new = list(request.prompt), []
    while True:
        new.append(next_id(ids))
        ids.append(new[-1])
        if new[-1] in request.end_ids:
            return new, Finish.STOP
        if len(new) == request.max_new_tokens:
            return new, Finish.LENGTH


def run(engine: Engine) -> list[Emitted]:
    emitted = []
    for _ in range(20_000):  # a leak of pages must end it too
        if engine.is_idle:
            return emitted
        emitted += engine.step()
    raise AssertionError("the engine does not end")


def test_requests_through_few_places_are_answered_as_each_alone() -> None:
    generator = random.Random(0)
    requests = [
        Request(
            prompt=tuple(generator.choices(range(VOCAB), k=generator.randint(1, 40))),
            max_new_tokens=generator.randint(1, 30),
            end_ids=frozenset(generator.sample(range(VOCAB), 3)),
        )
        for _ in range(200)
    ]
    model, cache = Model(), KeyValueCache(160)
    engine = Engine(model, cache, chunk_tokens=16, max_sequences=4)
    numbers = [engine.submit(request) for request in requests]
    emitted = run(engine)
    for number, request in zip(numbers, requests, strict=True):
        mine = [one for one in emitted if one.sequence == number]
        assert ([one.token for one in mine], mine[-1].finish) == alone(request)
        assert all(one.finish is None for one in mine[:-1])
    assert max(model.sizes) <= 16 + 4
    assert cache.free_tokens == 160
    assert engine.step() == []


def test_drawn_tokens_do_not_depend_on_what_else_is_in_the_batch() -> None:
    generator = random.Random(1)
    requests = [
        Request(
            prompt=tuple(generator.choices(range(VOCAB), k=generator.randint(1, 30))),
            max_new_tokens=generator.randint(1, 20),
            end_ids=frozenset({5}),
            sampling=Sampling(
                temperature=generator.choice([0, 0.5, 1]),
                top_p=generator.choice([0.9, 1]),
                repetition_penalty=generator.choice([1, 1.2]),
                logprobs=generator.choice([None, 2]),
                seed=generator.randrange(3),
            ),
        )
        for _ in range(40)
    ]
    together = Engine(Model(), KeyValueCache(160), chunk_tokens=16, max_sequences=4)
    numbers = [together.submit(request) for request in requests]
    emitted = run(together)
    for number, request in zip(numbers, requests, strict=True):
        alone = Engine(Model(), KeyValueCache(64))
        alone.submit(request)
        mine = [attrs.evolve(one, sequence=0) for one in emitted if one.sequence == number]
        assert mine == run(alone)


def kept(prompt: list[int], max_new_tokens: int, **fields: Any) -> Request:
    return Request(prompt=tuple(prompt), max_new_tokens=max_new_tokens, is_kept=True, **fields)


def test_a_resumed_sequence_computes_only_what_its_prompt_adds() -> None:
    """Prompts that begin with the text, with a part of it, and with nothing of it; one that is in
    the cache already; drawn tokens are those of a new sequence."""
    model, cache = Model(forgets=True), KeyValueCache(160)
    engine = Engine(model, cache, chunk_tokens=4)
    drawing = Sampling(temperature=1.0, seed=3)
    prompt, number, text = [1, 2, 3, 4, 5, 6], None, list[int]()
    for add, drop, cached in (([], 0, 0), ([7, 8], 0, 8), ([9], 5, 9), ([], 3, 9), ([1], 99, 0)):
        prompt = [*text[: len(text) - drop], *add] or prompt if drop < 99 else add
        request = kept(prompt, 3, sampling=drawing)
        if number is None:
            number = engine.submit(request)
        else:
            engine.resume(number, request)
        before = sum(model.sizes)
        emitted = run(engine)
        assert engine.num_cached(number) == cached
        assert sum(model.sizes) - before == len(prompt) - cached + 2
        alone = Engine(Model(), KeyValueCache(64))
        alone.submit(request)
        assert [one.token for one in emitted] == [one.token for one in run(alone)]
        text = [*prompt, *(one.token for one in emitted)]
    engine.cancel(number)
    assert cache.free_tokens == 160


def test_a_sequence_that_was_ended_is_resumed_from_what_is_computed() -> None:
    """Within its prompt, and within its answer; and one that waits."""
    model, cache = Model(forgets=True), KeyValueCache(48)
    engine = Engine(model, cache, chunk_tokens=4, max_sequences=1)
    number = engine.submit(kept([5] * 10, 20))
    for num_steps, cached in ((1, 4), (5, 9)):
        for _ in range(num_steps):
            engine.step()
        engine.end(number)
        assert engine.is_idle
        engine.resume(number, kept([5] * 10, 20))
        engine.step()
        assert engine.num_cached(number) == cached
    other = engine.submit(kept([5], 1))
    engine.end(other)
    engine.end(number)
    assert engine.step() == []
    assert cache.free_tokens == 16


def test_kept_pages_are_taken_when_others_need_them() -> None:
    """Those that ended first; a sequence without its pages is computed from its first token."""
    model, cache = Model(forgets=True), KeyValueCache(64)
    engine = Engine(model, cache)
    first, second = engine.submit(kept([1] * 10, 6)), engine.submit(kept([2] * 10, 6))
    assert len(run(engine)) == 12
    third = engine.submit(Request(prompt=(3,) * 10, max_new_tokens=30))
    assert len(run(engine)) == 30
    assert cache.free_tokens == 48, "one is kept still"
    engine.resume(second, kept([2] * 12, 2))
    run(engine)
    assert engine.num_cached(second) == 10
    engine.resume(first, kept([1] * 12, 20))
    run(engine)
    assert engine.num_cached(first) == 0
    engine.resume(second, kept([2] * 12, 50))  # it ended first, but the other one has to leave
    assert len(run(engine)) == 50
    assert engine.num_cached(second) == 11
    engine.resume(first, kept([1] * 12, 20))
    assert len(run(engine)) == 20
    assert engine.num_cached(first) == 0
    with pytest.raises(CacheFull, match="12 tokens and 60 new ones"):
        engine.resume(first, kept([1] * 12, 60))
    assert third == 2
    engine.cancel(first)
    engine.cancel(second)
    assert cache.free_tokens == 64


@pytest.mark.parametrize(
    ("lengths", "cached"),
    [
        (TextLengths(64), [4, 9, 14]),
        (TextLengths(64, boundary=12), [4, 0, 14]),
        (TextLengths(64, boundary=12, grows=True), [4, 0, 0]),
    ],
    ids=["fixed", "longrope", "dynamic"],
)
def test_keys_of_other_angles_are_not_resumed_from(lengths: TextLengths, cached: list[int]) -> None:
    """Prompts of 8, 13 and 18 tokens, after texts of 5, 10 and 15."""
    engine = Engine(
        Model(forgets=True),
        KeyValueCache(64),
        restarts_above=lengths.restarts_above,
        have_same_keys=lengths.have_same_keys,
    )
    number = engine.submit(kept([1] * 4, 1))
    text = [1] * 4 + [one.token for one in run(engine)]
    for expected in cached:
        engine.resume(number, kept([*text, 2, 2, 2], 2))
        text = [*text, 2, 2, 2, *(one.token for one in run(engine))]
        assert engine.num_cached(number) == expected


def test_the_first_to_ask_is_served_first_when_pages_are_short() -> None:
    engine = Engine(Model(), KeyValueCache(48))
    long = engine.submit(Request(prompt=(1,), max_new_tokens=48))
    second = engine.submit(Request(prompt=(2,), max_new_tokens=1))
    order = [one.sequence for one in run(engine)]
    assert order == [long] * 48 + [second]


def test_a_cancelled_sequence_frees_its_pages_at_once() -> None:
    cache = KeyValueCache(48)
    engine = Engine(Model(), cache)
    running = engine.submit(Request(prompt=(1,), max_new_tokens=40))
    waiting = engine.submit(Request(prompt=(1,), max_new_tokens=40))
    engine.step()
    assert cache.free_tokens == 0
    for sequence in (running, waiting, running, 99):
        engine.cancel(sequence)
    assert cache.free_tokens == 48
    assert engine.is_idle


def test_a_request_larger_than_the_cache_is_refused() -> None:
    engine = Engine(Model(), KeyValueCache(48))
    with pytest.raises(CacheFull, match="10 tokens and 40 new ones do not fit into a cache of 48"):
        engine.submit(Request(prompt=(1,) * 10, max_new_tokens=40))


def test_pages_that_are_not_released_are_noticed() -> None:
    cache = KeyValueCache(48)
    cache.reserve(99, 48)
    engine = Engine(Model(), cache)
    engine.submit(Request(prompt=(1,), max_new_tokens=4))
    with pytest.raises(AssertionError, match="some were not released"):
        engine.step()


def test_a_text_above_a_length_is_recomputed() -> None:
    """In chunks, among texts that stay shorter; the model sees both of its beginnings."""
    seen: list[tuple[int, int, int, int]] = []

    def model(step: Step) -> Tensor:
        seen.extend((one.sequence, one.start, one.count, one.length) for one in step.parts)
        return torch.zeros(len(step.rows_R), VOCAB)

    cache = KeyValueCache(48)
    engine = Engine(model, cache, chunk_tokens=4, restarts_above=5)
    engine.submit(Request(prompt=(1,) * 4, max_new_tokens=4))
    engine.submit(Request(prompt=(1,), max_new_tokens=3))
    assert len(run(engine)) == 7
    assert [part[1:] for part in seen if part[0] == 0] == [
        (0, 4, 4),
        (4, 1, 5),
        (0, 4, 6),
        (4, 2, 6),
        (6, 1, 7),
    ]
    assert [part[1:] for part in seen if part[0] == 1] == [(0, 1, 1), (1, 1, 2), (2, 1, 3)]


@pytest.mark.parametrize("ids", [[], [[]], [[1], [2]]], ids=["none", "empty", "twice"])
def test_a_step_without_sense_is_refused(ids: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="step"):
        Step.of([Chunk(sequence=0, start=0, ids=one, num_logits=0) for one in ids])
