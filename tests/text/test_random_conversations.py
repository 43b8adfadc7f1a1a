"""Rules that hold for every conversation, template and tokenizer, over random ones."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ascend_run.text.chat_tokenizer import ChatTokenizer, load_chat_tokenizer, read_tokenizer_config
from ascend_run.text.encoder import Encoder
from ascend_run.text.encoding import TOO_LONG, TRUNCATED, LengthLimit
from ascend_run.text.labelling import Labelled
from ascend_run.text.omissions import Omissions
from ascend_run.text.packing import pack
from ascend_run.text.samples import Conversation, Message
from ascend_run.text.template_records import NAMED
from ascend_run.text.templates import ChatTemplate
from tests.support.chats import bytes_tokenizer, greedy_tokenizer, write_tokenizer

TEMPLATES = ("alpaca", "chatml", "vicuna", "mistral", "zephyr", "minicpm")
CLOSED_BY_EOS = tuple(name for name in TEMPLATES if name != "chatml")

words = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cn", "Co")), min_size=1, max_size=20
).filter(str.strip)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """Turns of user and assistant, after a system message or none."""
    turns = draw(st.lists(st.tuples(words, words), min_size=1, max_size=4))
    system = draw(st.none() | words)
    messages = [{"role": "system", "content": system}] if system else []
    for asked, answer in turns:
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer},
        ]
    return tuple(messages)


@functools.cache
def tokenizer_of(backend: str) -> ChatTokenizer:
    make = {"bytes": bytes_tokenizer, "greedy": greedy_tokenizer}[backend]
    with tempfile.TemporaryDirectory() as name:
        folder = write_tokenizer(Path(name), None, make())
        return load_chat_tokenizer(folder, read_tokenizer_config(folder))


def labelled(name: str, messages: Sequence[Message], backend: str = "bytes") -> Labelled:
    tokenizer = tokenizer_of(backend)
    template = ChatTemplate(
        source=NAMED[name].jinja(), name=name, variables=tokenizer.variables, date=None
    )
    encoder = Encoder(tokenizer=tokenizer, template=template, keeps_special=False)
    (result,) = encoder.label([Conversation(messages=tuple(messages))])
    assume(isinstance(result, Labelled))  # a text may spell a special token
    assert isinstance(result, Labelled)
    return result


def runs(sample: Labelled) -> list[list[int]]:
    """Return the ids of each run of trained tokens."""
    found: list[list[int]] = []
    for index, (number, trained) in enumerate(zip(sample.ids, sample.trained, strict=True)):
        if trained:
            if not (index and sample.trained[index - 1]):
                found.append([])
            found[-1].append(number)
    return found


def decoded(ids: Sequence[int]) -> str:
    text: str = tokenizer_of("bytes").backend.decode(list(ids), skip_special_tokens=False)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations())
@settings(max_examples=25, deadline=None)
def test_the_ids_decode_to_the_conversation(name: str, messages: tuple[Message, ...]) -> None:
    sample = labelled(name, messages)
    record = NAMED[name]
    values = {"bos": "<s>", "eos": "</s>"}
    system = record.system.format(content=messages[0]["content"], **values)
    text, first = record.prefix.format(**values), True
    for message in messages:
        if message["role"] == "system":
            text += "" if record.system_in_user else system
        elif message["role"] == "user":
            content = message["content"]
            if first and record.system_in_user and messages[0]["role"] == "system":
                content = system + content
            text += record.user.format(content=content, **values)
            first = False
        else:
            turn = record.prompt + record.assistant
            text += turn.format(content=message["content"], **values)
    got = decoded(sample.ids)
    assert text.startswith(got)
    assert not text[len(got) :].strip()


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations())
@settings(max_examples=25, deadline=None)
def test_exactly_the_assistants_turns_are_trained(name: str, messages: tuple[Message, ...]) -> None:
    """For a tokenizer that does not merge over the borders of turns."""
    sample = labelled(name, messages)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    end = "</s>" if name in CLOSED_BY_EOS else "<|im_end|>"
    lead = " " if name == "vicuna" else ""
    assert [decoded(run).removesuffix("\n") for run in runs(sample)] == [
        f"{lead}{answer}{end}" for answer in answers
    ]


@pytest.mark.parametrize("backend", ["bytes", "greedy"])
@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations())
@settings(max_examples=12, deadline=None)
def test_there_is_one_begin_and_one_trained_end_of_each_turn(
    name: str, backend: str, messages: tuple[Message, ...]
) -> None:
    sample, tokenizer = labelled(name, messages, backend), tokenizer_of(backend)
    begins = [index for index, number in enumerate(sample.ids) if number == tokenizer.bos_id]
    assert begins == ([0] if NAMED[name].prefix else [])
    end = tokenizer.eos_id
    if name not in CLOSED_BY_EOS:
        end = tokenizer.backend.token_to_id("<|im_end|>")
    turns = runs(sample)
    assert len(turns) == sum(message["role"] == "assistant" for message in messages)
    assert [(run.count(end), run[-1]) for run in turns] == [(1, end)] * len(turns)
    assert sample.trained[-1]


@given(messages=conversations(), most=st.integers(2, 60))
@settings(max_examples=60, deadline=None)
def test_a_cut_at_turns_keeps_whole_turns(messages: tuple[Message, ...], most: int) -> None:
    sample, omissions = labelled("mistral", messages), Omissions()
    cut = LengthLimit(max_tokens=most, too_long="turns").fit("x:1", sample, omissions)
    whole = runs(sample)
    ends = [
        index + 1
        for index, trained in enumerate(sample.trained)
        if trained and not any(sample.trained[index + 1 : index + 2])
    ]
    fitting = [end for end in ends if end <= most]
    if len(sample.ids) <= most:
        assert (cut, omissions.report()) == (sample, {})
    elif not fitting:
        assert cut is None
        assert [*omissions.report()] == [TOO_LONG]
    else:
        assert cut is not None
        assert cut.ids == sample.ids[: fitting[-1]]
        assert runs(cut) == whole[: len(fitting)]
        assert [*omissions.report()] == [TRUNCATED]


@given(
    lengths=st.lists(st.integers(2, 33), min_size=1, max_size=200),
    whole=st.integers(0, 20),
)
@settings(max_examples=60, deadline=None)
def test_packing_ends_and_holds_each_sample_once(lengths: list[int], whole: int) -> None:
    """A sample of one token more than the capacity fills it: its last token is only a label."""
    capacity = 32
    given_lengths = [*lengths, *[capacity + 1] * whole]
    packs = pack(given_lengths, capacity)
    assert sorted(number for held in packs for number in held) == [*range(len(given_lengths))]
    filled = [sum(given_lengths[number] - 1 for number in held) for held in packs]
    assert max(filled) <= capacity
    assert filled.count(capacity) >= whole


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_packing_fills_what_lengths_allow(seed: int) -> None:
    """A thousand lengths spread over half of the capacity leave at most 2 % unused."""
    capacity, random = 1024, Random(seed)
    lengths = [random.randint(2, capacity // 2) for _ in range(1000)]
    packs = pack(lengths, capacity)
    assert sum(length - 1 for length in lengths) >= 0.98 * capacity * len(packs)
