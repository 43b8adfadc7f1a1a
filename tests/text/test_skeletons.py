"""Conversations rendered by filling gaps, against the same rendered one by one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.text.samples import Conversation
from ascend_run.text.template_records import NAMED
from ascend_run.text.templates import ChatTemplate, TemplateRefusal
from ascend_run.text.turns import Rendered, located, render
from tests.support import chats

LOOP = "{% for message in messages %}BODY{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
LLAMA3 = """
{%- for message in messages %}
    {%- set content = '<' + message['role'] + '>\\n\\n' + message['content'] | trim + '<eot>' %}
    {%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>\\n\\n' }}{% endif %}"""
QWEN = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {{- '<system>' + messages[0]['content'] + '<end>\\n' }}
{%- else %}{{- '<system>Help.<end>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<' + message.role + '>' + message.content + '<end>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<user>' }}
        {%- endif %}
        {{- message.content }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<end>' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}"""
NAMESPACED = """
{%- set ns = namespace(system='', count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = message.content.strip() %}
    {%- elif message.role == 'user' %}
        {%- set ns.count = ns.count + 1 %}
        {{- ns.count ~ (ns.system ~ ' ' if ns.system else '') ~ message.content | trim ~ '|' }}
    {%- else %}{{- (message.get('content') or 'nothing') ~ eos_token }}{% endif %}
{%- endfor %}"""
TRIMMED_TOGETHER = LOOP.replace("BODY", "{{ ('[' + message.role + ' ' + message.content) | trim }}")
TRIMMED_AT_THE_END = """
{%- set ns = namespace(text='') %}
{%- for message in messages %}{% set ns.text = ns.text ~ message.content ~ '\n' %}{% endfor %}
{{- ns.text | trim }}"""
TEMPLATES = {
    **{name: template.jinja() for name, template in NAMED.items()},
    **{n: v for n, v in vars(chats).items() if isinstance(v, str) and "{%" in v},
    "LLAMA3": LLAMA3,
    "QWEN": QWEN,
    "NAMESPACED": NAMESPACED,
    "TRIMMED_AT_THE_END": TRIMMED_AT_THE_END,
    "TRIMMED_TOGETHER": TRIMMED_TOGETHER + PROMPT.replace("<assistant>", "[assistant "),
}
WITHOUT_SKELETON = ("LAST_TURN_THINKS", "TRIMMED_AT_THE_END")
"""Their earlier turns are not where a prefix of the conversation ends, or end within a content."""
READS = {
    "length": "{{ message.content | length }}",
    "comparison": "{% if message.content == 'a' %}x{% endif %}",
    "membership": "{% if 'a' in message.content %}x{% endif %}",
    "beginning": "{% if message.content.startswith('a') %}x{% endif %}",
    "part": "{{ message.content[1:] }}",
    "part of what follows": "{{ loop.nextitem.content[0] if loop.nextitem else '' }}",
    "split": "{% set content = message.content.split('a')[-1] %}{{ content }}",
    "through a name": "{% set x = '<' + message.content %}{% if x == '<a' %}x{% endif %}",
    "through a block": "{% set x %}{{ message.content }}{% endset %}{{ x | upper }}",
    "through a namespace": (
        "{% set ns = namespace(x='') %}{% set ns.x = message.content %}{{ ns.x | upper }}"
    ),
    "through another name of it": (
        "{% set ns = namespace(x='') %}{% set other = ns %}{% set other.x = message.content %}"
        "{{ ns.x | upper }}"
    ),
    "through a later name": "{{ y | upper }}{% set y = x %}{% set x = message.content %}",
    "of a message as a whole": "{{ message }}",
    "as JSON": "{{ message | tojson }}",
    "among the values": "{% for value in message.values() %}{{ value[0] }}{% endfor %}",
    "among the items": "{% for key, value in message.items() %}{{ value | upper }}{% endfor %}",
    "by a name": "{% set key = 'content' %}{{ message[key] | upper }}",
    "upper case": "{{ message.content | upper }}",
    "trimmed of a letter": "{{ message.content | trim('a') }}",
    "stripped of a letter": "{{ message.content.strip('a') }}",
    "formatted": "{{ '%.3s' % message.content }}",
    "change": "{% if loop.changed(message.content) %}x{% endif %}",
    "in a list": "{{ [message.content] | join(',') | upper }}",
    "in a macro": "{% macro f(x) %}{{ x | upper }}{% endmacro %}{{ f(message.content) }}",
    "in a filter": "{% filter upper %}{{ message.content }}{% endfilter %}",
    "as many": "{{ 'a' * message.content | length }}",
    "of two equal ones": "{{ messages[0].content == message.content }}",
    "by an attribute": "{{ messages | map(attribute='content') | join | upper }}",
    "sorted": "{% for m in messages | sort(attribute='content') %}{{ m.content }}{% endfor %}",
}

spaces = st.sampled_from(["", " ", "\n", "\u2003", "\x0b "])
words = st.text(
    st.one_of(st.sampled_from("ab<>\u2003\U0010fff3 0\n"), st.characters(codec="utf-8")),
    min_size=1,
    max_size=8,
).filter(lambda text: text.strip() and not {*text} & {*"\U0010fff0\U0010fff1\U0010fff2"})
contents = st.builds("{}{}{}".format, spaces, words, spaces)
maybe_blank = st.one_of(*[contents] * 9, spaces)
roles = st.lists(st.sampled_from(["user", "assistant", "tool"]), min_size=1, max_size=5)
shapes = st.builds(lambda first, rest: (*first, *rest), st.sampled_from([(), ("system",)]), roles)
usual = st.builds(
    lambda first, turns: (*first, *("user", "assistant") * turns),
    st.sampled_from([(), ("system",)]),
    st.integers(1, 3),
)


@functools.cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(
        source=TEMPLATES[name],
        name=name,
        variables={"bos_token": "<s>", "eos_token": "</s>"},
        date="2026-01-01",
    )


def attempt(make: Any, template: ChatTemplate, conversation: Conversation) -> Rendered | str:
    try:
        found: Rendered = make(template, conversation)
    except TemplateRefusal as refusal:
        return str(refusal)
    return found


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(TEMPLATES)), usual | shapes, st.data())
def test_a_filled_skeleton_is_what_the_template_renders(
    name: str, shape: tuple[str, ...], data: st.DataObject
) -> None:
    template = template_of(name)
    for _ in range(3):  # from the second on by the skeleton, if there is one
        texts = data.draw(st.lists(maybe_blank, min_size=len(shape), max_size=len(shape)))
        messages = ({"role": r, "content": t} for r, t in zip(shape, texts, strict=True))
        conversation = Conversation(messages=(*messages,))
        wanted = attempt(located, template, conversation)
        assert attempt(render, template, conversation) == wanted


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_copies_contents_renders_by_skeletons(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(
        source=TEMPLATES[name], name=name, variables={"bos_token": "", "eos_token": "#"}, date=None
    )
    assert template.copies_contents
    made = ChatTemplate.render
    calls = []

    def counted(self: ChatTemplate, *given: Any, **named: Any) -> str:
        calls.append(given)
        return made(self, *given, **named)

    for number in range(4):
        messages = ({"role": r, "content": f" {r}{number} "} for r in ("user", "assistant") * 2)
        conversation = Conversation(messages=(*messages,))
        wanted = located(template, conversation)
        with monkeypatch.context() as patch:
            patch.setattr(ChatTemplate, "render", counted)
            calls.clear()
            assert render(template, conversation) == wanted
    assert (calls == []) is (name not in WITHOUT_SKELETON)


@pytest.mark.parametrize("body", READS.values(), ids=READS)
def test_a_template_that_reads_contents_is_rendered_each_time(body: str) -> None:
    template = ChatTemplate(
        source=LOOP.replace("BODY", body), name="reads", variables={}, date=None
    )
    assert not template.copies_contents


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": " \n"},
        {"role": "user", "content": ""},
        {"role": "user", "content": "a", "name": "b"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    ],
    ids=["blank", "empty", "another key", "a call"],
)
def test_other_messages_have_no_skeleton(message: dict[str, Any]) -> None:
    """The template prints more than the contents of such."""
    source = LOOP.replace(
        "BODY", "{{ message.name }}{{ message.content or 'none' }}{{ message.tool_calls | length }}"
    )
    template = ChatTemplate(source=source, name="more", variables={}, date=None)
    assert template.copies_contents
    other = {"role": message["role"], "content": "other"}
    for one in (other, other, message):
        conversation = Conversation(messages=(one,))
        assert attempt(render, template, conversation) == attempt(located, template, conversation)
    tools = Conversation(messages=(other,), tools=[{"name": "f"}])
    with_tools = ChatTemplate(source="{{ tools }}" + source, name="tools", variables={}, date=None)
    for _ in range(3):
        assert "name" in render(with_tools, tools).text


def test_documents_reach_the_template_of_every_conversation() -> None:
    source = "{% if documents %}<{{ documents[0].text }}>{% endif %}" + LOOP.replace(
        "BODY", "[{{ message.role }}]{{ message.content }}"
    )
    given = ChatTemplate(source=source, name="here", variables={}, date=None)
    messages = ({"role": "user", "content": "U"}, {"role": "assistant", "content": "A"})
    told = Conversation(messages=messages, documents=[{"text": "D"}])
    plain = Conversation(messages=messages)
    for _ in range(3):  # also where there is a skeleton of these roles
        assert render(given, told) == Rendered("<D>[user]U[assistant]A", ((10, 22),))
        assert render(given, plain).text == "[user]U[assistant]A"
