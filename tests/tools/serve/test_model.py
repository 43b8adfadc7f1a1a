"""A model behind the server: each answer is that of ``generate``, whatever else is asked."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import http.client
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, pairwise
from typing import Any

import attrs
import openai
import psutil
import pytest

from ascend_run.ops.generation.engine import Request
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.text.tokenizer import train_tokenizer
from ascend_run.tools.generate.session import Piece, Session
from ascend_run.tools.serve.app import Service
from ascend_run.tools.serve.engine_thread import EngineThread
from ascend_run.tools.serve.limits import Limits
from ascend_run.tools.serve.opening import ServeQuestion, opened
from ascend_run.tools.serve.served_model import ServedModel
from tests.support.tiny_llama import write_llama

from .serving import SECONDS, post, served, until

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box in vain"

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")


@attrs.frozen(kw_only=True, eq=False)
class Loaded:
    """A server with a model of random weights behind it."""

    port: int
    model: ServedModel
    engine: EngineThread
    cache: Any
    alone: dict[str, str]
    """Of each prompt: its greedy answer by the engine alone."""
    finishes: dict[str, str]

    def text(self, prompt: str, **fields: Any) -> str:
        """Ask for a greedy answer."""
        body = {"model": "llama", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        status, answer = post(self.port, "/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("models") / "llama"
    folder.mkdir()
    tokenizer = train_tokenizer([WORDS] * 4, 300)
    write_llama(folder, vocab_size=tokenizer.vocab_size, eos_token_id=7)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    ends = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    with opened(ServeQuestion(model=folder, dtype="fp64", cache_tokens=600)) as (model, session):
        alone = {prompt: _alone(session, model, prompt) for prompt in prompts(20)}
        variables = dict(os.environ)  # which are undone after the first test, and needed at the end
        with EngineThread(session) as engine:
            service = Service(model=model, engine=engine, limits=Limits())
            with served(service.app(), service.limits) as port:
                yield Loaded(
                    port=port,
                    model=model,
                    engine=engine,
                    cache=session._engine._cache,
                    alone={prompt: text for prompt, (text, _) in alone.items()},
                    finishes={prompt: finish for prompt, (_, finish) in alone.items()},
                )
        os.environ.update(variables)


def prompts(number: int) -> list[str]:
    draw = random.Random(5)
    return [" ".join(draw.choices(WORDS.split(), k=draw.randint(1, 12))) for _ in range(number)]


def _alone(session: Session, model: ServedModel, prompt: str) -> tuple[str, str]:
    import torch

    request = Request(prompt=model.texts.ids(prompt), max_new_tokens=8, end_ids=model.texts.end_ids)
    session.submit(request)
    text = finish = ""
    with torch.no_grad():
        while not session.is_idle:
            for piece in session.step():
                text, finish = text + piece.text, str(piece.finish)
    return text, finish


@pytest.fixture(autouse=True)
def _nothing_is_left(loaded: Loaded, no_network: None) -> Iterator[None]:
    """After each test all pages are free; no socket reaches beyond this machine."""
    yield
    assert loaded.engine.failure is None
    until(lambda: loaded.engine.is_idle and not loaded.engine.open)
    assert loaded.cache.free_tokens == loaded.cache.num_pages * loaded.cache.page_size


@contextlib.contextmanager
def streaming(loaded: Loaded, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """Ask for a stream; the connection is closed at the end."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", loaded.port, SECONDS)) as line:
        body = json.dumps({"model": "llama", "stream": True, "temperature": 0, **fields})
        line.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        yield line.getresponse()


def streamed(client: openai.OpenAI, prompt: str) -> str:
    parts = client.completions.create(
        model="llama", prompt=prompt, max_tokens=8, temperature=0, stream=True
    )
    return "".join(part.choices[0].text for part in parts)


def test_of_200_requests_at_once_none_is_lost_or_mixed(loaded: Loaded) -> None:
    """The cache has room for about half of the prompts, so they wait as well."""
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{loaded.port}/v1",
        api_key="none",
        timeout=SECONDS,
        max_retries=0,
    )
    barrier = threading.Barrier(200)

    def ask(index: int) -> tuple[str, str]:
        prompt = [*loaded.alone][index % len(loaded.alone)]
        barrier.wait(SECONDS)
        return prompt, streamed(client, prompt) if index % 2 else loaded.text(prompt)

    with client, ThreadPoolExecutor(200) as threads:
        found = [*threads.map(ask, range(200), timeout=2 * SECONDS)]
    assert len(found) == 200
    assert len({*loaded.alone.values()}) > 10, "answers differ"
    for prompt, text in found:
        assert text == loaded.alone[prompt]


def test_several_prompts_are_answered_as_each_alone(loaded: Loaded) -> None:
    body = {"model": "llama", "prompt": [*loaded.alone], "max_tokens": 8, "temperature": 0}
    status, answer = post(loaded.port, "/v1/completions", body)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == [*loaded.alone.values()]


def test_the_finish_and_stop_words_are_those_of_the_engine(loaded: Loaded) -> None:
    prompt, text = max(loaded.alone.items(), key=lambda pair: len(pair[1]))
    body = {"model": "llama", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    _, answer = post(loaded.port, "/v1/completions", body)
    assert answer["choices"][0]["finish_reason"] == loaded.finishes[prompt]
    word = text[3:5]
    for stop in (word, [word, "no such text"]):
        _, answer = post(loaded.port, "/v1/completions", {**body, "stop": stop})
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(word)], "stop")


def test_a_stream_closed_within_frees_its_pages(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, is_closed = 0, threading.Event()

    def step() -> list[Piece]:
        nonlocal steps
        steps += 1
        if steps == 3:
            is_closed.wait(SECONDS)
        return found()

    found, free = loaded.engine._session.step, loaded.cache.free_tokens
    monkeypatch.setattr(loaded.engine._session, "step", step)
    with streaming(loaded, prompt="the quick", max_tokens=40) as answer:
        assert answer.read(6) == b"data: "
        assert loaded.cache.free_tokens < free
    until(lambda: not loaded.engine.open)
    is_closed.set()
    until(lambda: loaded.engine.is_idle)
    assert steps < 10, "the answer does not go on"
    assert loaded.cache.free_tokens == free


def test_a_stated_length_is_that_of_the_model(loaded: Loaded) -> None:
    message = "--rope-length 9: it goes with the RoPE scalings"
    question = ServeQuestion(model=loaded.model.texts.path.parent, rope_length=9)
    with pytest.raises(ConfigError, match=message), opened(question):
        pass


def test_a_seed_gives_the_same_draws_again(loaded: Loaded) -> None:
    def drawn(**fields: Any) -> str:
        return loaded.text("the fox", temperature=1.5, **fields)

    assert drawn(seed=3) == drawn(seed=3)
    assert len({drawn(seed=seed) for seed in range(4)}) > 1
    assert len({drawn() for _ in range(4)}) > 1, "without a seed each draws its own"


def test_log_probabilities_are_those_of_the_model(loaded: Loaded) -> None:
    body = {"model": "llama", "prompt": "a lazy dog", "max_tokens": 4, "temperature": 0}
    _, answer = post(loaded.port, "/v1/completions", {**body, "logprobs": 3})
    logprobs = answer["choices"][0]["logprobs"]
    for logprob, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert logprob == max(top.values()) < 0, "greedy"


def test_a_chat_has_the_special_tokens_of_its_template(loaded: Loaded) -> None:
    eod = loaded.model.texts.tokenizer.eod
    messages = [{"role": "user", "content": "the quick fox"}]
    body = {"model": "llama", "messages": messages, "max_tokens": 3, "temperature": 0}
    status, answer = post(loaded.port, "/v1/chat/completions", body)
    assert status == 200
    ids = [eod, *loaded.model.texts.ids("the quick fox ")]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    expected = loaded.text(ids, max_tokens=3)  # type: ignore[arg-type]
    assert answer["choices"][0]["message"]["content"] == expected
    assert {eod, 7} <= loaded.model.texts.end_ids, "the chat's and the model's"


@pytest.mark.exhaustive(by=lambda number: [0] * (number == 300))
@pytest.mark.parametrize("number", [300, 5000])
def test_memory_does_not_grow(loaded: Loaded, number: int) -> None:
    """Of whole answers, streams, chats, and streams that are closed within."""

    def whole(prompt: str) -> None:
        loaded.text(prompt, max_tokens=2)

    def stream(prompt: str) -> None:
        with streaming(loaded, prompt=prompt, max_tokens=2) as answer:
            assert answer.read().endswith(b"[DONE]\n\n")

    def chat(prompt: str) -> None:
        body = {"model": "llama", "messages": [{"role": "user", "content": prompt}]}
        assert post(loaded.port, "/v1/chat/completions", {**body, "max_tokens": 2})[0] == 200

    def closed(prompt: str) -> None:
        with streaming(loaded, prompt=prompt, max_tokens=40) as answer:
            assert answer.read(6) == b"data: "

    lines = psutil.Process().net_connections

    def asked(count: int) -> None:
        kinds: Sequence[Callable[[str], None]] = [whole, stream, chat, closed]
        some = [*loaded.alone] * -(-count // len(loaded.alone))
        with ThreadPoolExecutor(8) as threads:
            done = threads.map(lambda kind, prompt: kind(prompt), cycle(kinds), some)
            assert len([*done]) >= count
        until(lambda: loaded.engine.is_idle and not loaded.engine.open)
        until(lambda: not any(one.laddr[1:] == (loaded.port,) and one.raddr for one in lines()))

    def used() -> tuple[int, int]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # pages that are free, but held back
        return len(gc.get_objects()), psutil.Process().memory_info().rss

    asked(100)
    seen = [used()]
    for _ in range(3):
        asked(number // 3)
        seen.append(used())
    # What a request leaves behind is left by each; the rest of this process adds now and then.
    objects, memory = (min(b - a for a, b in pairwise(each)) for each in zip(*seen, strict=True))
    assert objects < number / 30, "less than an object for ten requests"
    assert memory < max(1e6, 1e3 * number / 3), "less than 1 KB for each"
