"""Locate the assistant's turns in a rendered conversation. No torch.

A turn is everything that the model would write: from the end of its generation prompt to the end of
what the template closes a turn with. It is located by rendering prefixes of the conversation. Some
templates render an earlier turn differently from the last one (they omit its reasoning); there the
turn is located by rendering a marker in its place. A template that copies contents renders and
locates once for all conversations of the same roles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs

from .samples import Conversation
from .skeletons import Shape, Skeleton, Span, marked_contents, shape_of, skeleton_of
from .templates import BEGIN, END, MARK, ChatTemplate, TemplateRefusal

Draw: TypeAlias = Callable[..., str]
"""``ChatTemplate.render``, with the conversation's tools and documents."""


@attrs.frozen
class Rendered:
    """A conversation as text."""

    text: str
    spans: tuple[Span, ...]
    """The assistant's turns, in order."""
    weights: tuple[float, ...] | None = None
    """Of each turn in the loss; None: 1."""
    weight_of_prompts: float = 0.0
    """Of what is between the turns."""


def render(template: ChatTemplate, conversation: Conversation) -> Rendered:
    """Render a conversation and locate the turns to train; empty turns are left out.

    Raises:
        TemplateRefusal: See ``ChatTemplate.render``; or a turn cannot be located in the text.
    """
    if template.copies_contents and (shape := shape_of(conversation)) is not None:
        skeleton = template.skeletons.of(shape, partial(_skeleton, template))
        if skeleton is not None:
            contents = [message["content"] for message in conversation.messages]
            return Rendered(*skeleton.filled(contents))
    return located(template, conversation)


def located(template: ChatTemplate, conversation: Conversation) -> Rendered:
    """Render a conversation and prefixes of it, as ``render`` does where there is no skeleton."""
    messages = conversation.messages
    draw = partial(template.render, tools=conversation.tools, documents=conversation.documents)
    text = draw(messages)
    if BEGIN in text:
        return _marked(text)
    spans = [
        _turn(draw, messages, index, text)
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and says_something(message)
    ]
    return Rendered(text, tuple(spans))


def _skeleton(template: ChatTemplate, shape: Shape) -> Skeleton | None:
    """Return the skeleton of a shape; None where a turn is not located by a prefix."""
    messages = marked_contents(shape).messages
    spans: list[Span] = []
    try:
        text = template.render(messages)
        if BEGIN in text:
            marked = _marked(text)
            return skeleton_of(marked.text, marked.spans)
        for index, role in enumerate(shape):
            if role == "assistant":
                start = _prompt_end(template.render, messages[:index], text)
                span = _by_prefix(template.render, messages, index, text, start)
                if span is None:
                    return None
                spans.append(span)
    except TemplateRefusal:
        return None
    return skeleton_of(text, spans)


def says_something(message: Mapping[str, Any]) -> bool:
    """Whether a turn of the assistant has anything to train."""
    return bool((message["content"] or "").strip() or message.get("tool_calls"))


def _marked(text: str) -> Rendered:
    """Take the turns that the template itself marks as generated."""
    plain, spans, length = [], [], 0
    for part in text.split(BEGIN):
        inside, found, outside = part.partition(END)
        if found and inside.strip():
            spans.append((length, length + len(inside)))
        plain += [inside, outside]
        length += len(inside) + len(outside)
    return Rendered("".join(plain), tuple(spans))


def _turn(
    draw: Draw,
    messages: Sequence[Mapping[str, object]],
    index: int,
    text: str,
) -> Span:
    start = _prompt_end(draw, messages[:index], text)
    if (span := _by_prefix(draw, messages, index, text, start)) is not None:
        return span
    begin, end = _by_mark(draw, messages, index, text)
    return (begin if start is None or start > begin else start), end


def _by_prefix(
    draw: Draw,
    messages: Sequence[Mapping[str, object]],
    index: int,
    text: str,
    start: int | None,
) -> Span | None:
    """Locate the end of a turn by rendering up to it; None if the text does not begin with that."""
    is_last = index == len(messages) - 1
    until = text if is_last else draw(messages[: index + 1])
    if start is not None and start < len(until) and text.startswith(until):
        return start, len(until)
    return None


def _prompt_end(draw: Draw, before: Sequence[Mapping[str, object]], text: str) -> int | None:
    """Return the end of the prompt for a turn.

    Returns None if the conversation does not start with the prompt, or the template cannot render a
    conversation that short.
    """
    try:
        prompt = draw(before, prompt=True)
    except TemplateRefusal:
        return None
    return len(prompt) if text.startswith(prompt) else None


def _by_mark(
    draw: Draw,
    messages: Sequence[Mapping[str, Any]],
    index: int,
    text: str,
) -> Span:
    """Locate a turn's content and closing text by replacing the content with a marker."""
    changed = [*messages]
    changed[index] = {**messages[index], "content": MARK}
    before, found, after = draw(changed).partition(MARK)
    end = len(text) - len(after)
    if not found or len(before) > end or not (text.startswith(before) and text.endswith(after)):
        raise TemplateRefusal(
            f"message {index + 1} cannot be located in the rendered conversation; use a "
            "template with {% generation %} blocks"
        )
    closing = draw(changed[: index + 1]).partition(MARK)[2]
    return len(before), end + _common_length(after, closing)


def _common_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
