"""OpenAI's own client, against an engine whose answers are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .serving import SECONDS, Served


@pytest.fixture(scope="module")
def client(tiny: Served) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{tiny.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=SECONDS, max_retries=0) as client:
        yield client


def expected(tiny: Served, prompt: str, count: int) -> str:
    """The letters after the last id of the prompt."""
    last = tiny.texts.ids(prompt)[-1]
    return "".join(chr(ord("a") + (last + n) % 26) for n in range(count))


def test_models_are_listed_and_named(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.created, model.owned_by) == (
        *("tiny", "model", 1),
        "ascend-run",
    )
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.models.retrieve("a/b")


def test_a_completion_has_text_finish_and_usage(client: openai.OpenAI, tiny: Served) -> None:
    one = client.completions.create(model="tiny", prompt="fox", max_tokens=5)
    (choice,) = one.choices
    assert (one.object, one.model, choice.index) == ("text_completion", "tiny", 0)
    assert (choice.text, choice.finish_reason) == (expected(tiny, "fox", 5), "length")
    assert choice.logprobs is None
    number = len(tiny.texts.ids("fox"))
    assert one.usage is not None
    found = (one.usage.prompt_tokens, one.usage.completion_tokens, one.usage.total_tokens)
    assert found == (number, 5, number + 5)
    assert one.id.startswith("cmpl-")
    assert client.completions.create(model="tiny", prompt="fox").usage.completion_tokens == 16  # type: ignore[union-attr]


def test_ids_and_a_list_of_one_are_the_same_prompt(client: openai.OpenAI, tiny: Served) -> None:
    ids = [*tiny.texts.ids("brown fox")]
    for prompt in ("brown fox", ["brown fox"], ids, [ids]):
        one = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
        assert one.choices[0].text == expected(tiny, "brown fox", 2)
        assert tiny.session.submitted[-1].prompt == tuple(ids)


def test_a_streamed_completion_is_the_same_text(client: openai.OpenAI, tiny: Served) -> None:
    stream = client.completions.create(
        model="tiny",
        prompt="fox",
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = list(stream)
    assert "".join(part.choices[0].text for part in parts) == expected(tiny, "fox", 40)
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [
        "length"
    ]
    assert len({part.id for part in (*parts, last)}) == 1
    assert all(part.usage is None for part in parts)
    assert (last.choices, last.usage.completion_tokens) == ([], 40)  # type: ignore[union-attr]
    plain = client.completions.create(model="tiny", prompt="fox", max_tokens=2, stream=True)
    assert all(part.choices for part in plain), "no usage unasked"


def test_several_prompts_have_an_answer_each(client: openai.OpenAI, tiny: Served) -> None:
    """Texts and ids in one request, whole and streamed; draws differ but for the first."""
    prompts: Any = ["fox", [*tiny.texts.ids("lazy dog")], "fox"]
    fields: Any = {"model": "tiny", "prompt": prompts, "max_tokens": 5, "logprobs": 0, "seed": 3}
    one = client.completions.create(**fields)
    wanted = [expected(tiny, text, 5) for text in ("fox", "lazy dog", "fox")]
    assert [(choice.index, choice.text) for choice in one.choices] == [*enumerate(wanted)]
    assert all(choice.logprobs.text_offset == [0, 1, 2, 3, 4] for choice in one.choices)  # type: ignore[union-attr]
    number = sum(len(tiny.texts.ids(text)) for text in ("fox", "lazy dog", "fox"))
    assert one.usage is not None
    assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (number, 15)
    seeds = [request.sampling.seed for request in tiny.session.submitted[-3:]]
    assert seeds[0] == 3
    assert len({*seeds}) == 3

    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = client.completions.create(**fields, **options)
    texts, offsets, finishes = ["", "", ""], [[], [], []], [[], [], []]  # type: ignore[var-annotated]
    for part in parts:
        (choice,) = part.choices
        texts[choice.index] += choice.text
        offsets[choice.index] += choice.logprobs.text_offset
        finishes[choice.index].append(choice.finish_reason)
    assert texts == wanted
    assert offsets == [[0, 1, 2, 3, 4]] * 3
    assert all(found[-1] == "length" and not any(found[:-1]) for found in finishes)
    assert (last.choices, last.usage.completion_tokens) == ([], 15)


def test_a_stop_word_ends_the_answer(client: openai.OpenAI, tiny: Served) -> None:
    letters = expected(tiny, "fox", 5)
    for stop in (letters[3], ["no such text", letters[3]]):
        fields: Any = {"model": "tiny", "prompt": "fox", "max_tokens": 5, "stop": stop}
        (choice,) = client.completions.create(**fields).choices
        assert (choice.text, choice.finish_reason) == (letters[:3], "stop")
        parts = [part.choices[0] for part in client.completions.create(**fields, stream=True)]
        assert "".join(part.text for part in parts) == letters[:3]
        assert parts[-1].finish_reason == "stop"


def test_log_probabilities_of_a_completion(client: openai.OpenAI, tiny: Served) -> None:
    arguments = {"model": "tiny", "prompt": "fox", "max_tokens": 3, "logprobs": 2}
    whole = client.completions.create(**arguments).choices[0].logprobs  # type: ignore[call-overload]
    letters = expected(tiny, "fox", 3)
    assert whole.tokens == [*letters]
    assert whole.token_logprobs == [-0.5] * 3
    assert whole.text_offset == [0, 1, 2]
    assert [*whole.top_logprobs[0].items()] == [
        (letters[0], -0.5),
        (chr(ord(letters[0]) + 1), -1.5),
    ]
    parts = [*client.completions.create(**arguments, stream=True)]  # type: ignore[call-overload]
    joined = [part.choices[0].logprobs for part in parts]
    assert [token for one in joined for token in one.tokens] == whole.tokens
    assert [offset for one in joined for offset in one.text_offset] == whole.text_offset


def test_a_chat_is_rendered_by_the_template(client: openai.OpenAI, tiny: Served) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}],
        },
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    prompt = "system: Be brief.\nuser: Hi!\nassistant: Hello\nuser: Bye\nassistant:"
    one = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)  # type: ignore[call-overload]
    backend = tiny.texts.tokenizer.backend
    assert backend.decode(tiny.session.submitted[-1].prompt) == prompt
    (choice,) = one.choices
    assert (one.object, choice.finish_reason) == ("chat.completion", "length")
    assert (choice.message.role, choice.message.content) == (
        "assistant",
        expected(tiny, prompt, 4),
    )
    assert one.usage.completion_tokens == 4
    parts = [
        *client.chat.completions.create(  # type: ignore[call-overload]
            model="tiny", messages=messages, max_completion_tokens=4, stream=True
        )
    ]
    deltas = [part.choices[0].delta for part in parts]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert parts[-1].choices[0].finish_reason == "length"
    assert {part.object for part in parts} == {"chat.completion.chunk"}


def test_log_probabilities_of_a_chat(client: openai.OpenAI, tiny: Served) -> None:
    one = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = one.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    first = logprobs.content[0]
    assert (first.logprob, first.bytes) == (-0.5, [*first.token.encode()])
    assert [top.logprob for top in first.top_logprobs] == [-0.5, -1.5]
    assert "".join(token.token for token in logprobs.content) == one.choices[0].message.content


def test_a_chat_without_a_limit_may_fill_the_model(client: openai.OpenAI, tiny: Served) -> None:
    messages = [{"role": "user", "content": "x" * 2000}]
    one = client.chat.completions.create(model="tiny", messages=messages)  # type: ignore[call-overload]
    assert one.usage.total_tokens == 2048


def test_settings_of_the_draws_reach_the_engine(client: openai.OpenAI, tiny: Served) -> None:
    client.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=1,
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2},
    )
    sampling = tiny.session.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 2**63 - 1)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (7, 0.1, 1.2)
    client.completions.create(model="tiny", prompt="a", max_tokens=1)
    assert tiny.session.submitted[-1].sampling.temperature == 1.0, "OpenAI's default"
    client.completions.create(model="tiny", prompt="a", max_tokens=1, temperature=1e-30)
    assert tiny.session.submitted[-1].sampling.temperature == 0.0, "its limit"
