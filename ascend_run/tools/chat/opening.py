"""Open a stored model to talk to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from ascend_run.plugin_api.errors import AscendRunError, ConfigError
from ascend_run.text.templates import ChatTemplate, TemplateRefusal
from ascend_run.text.tool_calls import described
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.answering import DTYPES, model_texts
from ascend_run.tools.generate.cache_size import cache_tokens
from ascend_run.tools.generate.chat_texts import ChatTexts, with_template
from ascend_run.tools.generate.model import loaded_model
from ascend_run.tools.generate.model_options import ModelOptions
from ascend_run.tools.generate.sampling_options import SamplingOptions
from ascend_run.tools.generate.session import Session

from .chat import Chat, ChatSettings
from .conversation import Conversation, name_of
from .prompts import Prompts

_SMALLEST_ROOM = 4
"""An answer has room for at least one part in so many of the longest text, if it may be so long."""


@attrs.frozen(kw_only=True)
class ChatQuestion:
    """What a user says about a chat."""

    model: Path
    options: SourceOptions = attrs.field(factory=SourceOptions)
    tokenizer: Path | None = None
    template: str | None = None
    dtype: str | None = None
    rope_length: int | None = None
    cache_tokens: int | None = None
    """Default: what the longest text needs, and at most half of the free memory."""
    system: str | None = None
    tools: Path | None = None
    history_turns: int | None = None
    max_new_tokens: int = 256
    sampling: SamplingOptions = attrs.field(factory=SamplingOptions)


@attrs.frozen(kw_only=True, eq=False)
class Prepared:
    """What is known before the model is loaded."""

    chat: ChatTexts
    tools: list[Any] | None
    """Definitions, as templates read them."""


def prepared(question: ChatQuestion, problems: Sequence[str] = ()) -> Prepared:
    """Read the tokenizer, its template and the tools.

    Args:
        problems: Of other options, to report with those that are found here.

    Raises:
        ConfigError: Something cannot be used; lists all.
    """
    found = [*problems, *question.sampling.problems()]
    tools = None
    try:
        tools = None if question.tools is None else read_tools(question.tools)
    except ValueError as problem:
        found.append(f"--tools {question.tools}: {problem}")
    try:
        texts = model_texts(question.model, question.options, question.tokenizer)
        chat = with_template(texts, question.template, tools=question.tools is not None)
    except AscendRunError as problem:
        line = ": ".join([problem.headline, *filter(None, ["; ".join(problem.problems)])])
        raise ConfigError("the chat cannot begin", [*found, line]) from None
    found += _template_problems(chat, question.system, tools)
    if found:
        raise ConfigError("the chat cannot begin", found)
    return Prepared(chat=chat, tools=tools)


@contextmanager
def opened(question: ChatQuestion, known: Prepared) -> Iterator[Chat]:
    """Load a model; everything is undone on exit.

    Raises:
        AscendRunError: It cannot be read; or the cache is larger than the free memory.
    """
    dtype = None if question.dtype is None else DTYPES[question.dtype]
    options = ModelOptions(rope_length=question.rope_length)
    with loaded_model(question.model, question.options, dtype, options) as model:
        num_tokens = cache_tokens(model, question.cache_tokens, 1)
        longest = min(model.max_length, num_tokens)
        prompts = Prompts(
            chat=known.chat,
            tools=known.tools,
            history_turns=question.history_turns,
            longest=longest,
            room=min(question.max_new_tokens, max(longest // _SMALLEST_ROOM, 1)),
            vocab_size=model.config.model.vocab_size,
        )
        settings = ChatSettings(
            max_new_tokens=question.max_new_tokens,
            sampling=question.sampling.sampling(),
            stop=question.sampling.stop,
            tools=frozenset(map(name_of, known.tools or ())),
        )
        session = Session(model.engine(num_tokens, max_sequences=1), known.chat.texts)
        yield Chat(session, prompts, settings, Conversation(system=question.system))


def read_tools(path: Path) -> list[Any]:
    """Read definitions of functions, in the form of OpenAI's API or without its ``type``.

    Raises:
        ValueError: There is no such list in the file.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as problem:
        raise ValueError(f"cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"is no JSON: {problem}") from None
    tools = described(content) if isinstance(content, list) else None
    if not tools or not all(_is_function(tool) for tool in tools):
        raise ValueError(
            'expected a list of {"type": "function", "function": {"name": ..., "description": ..., '
            '"parameters": ...}}'
        )
    return tools


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _template_problems(chat: ChatTexts, system: str | None, tools: Any) -> Iterator[str]:
    """Say why a template cannot render a system message, or tools."""
    given = {"--system": system, "--tools": tools}
    named = ", ".join(option for option, value in given.items() if value is not None)
    if not named:
        return
    if chat.template is None:
        yield f"{named}: {chat.no_template}"
        return
    if tools is not None and "tools" not in chat.template.source:
        yield f"--tools: {chat.template.name} has no form for tools; name another with --template"
    if (problem := _refusal(chat.template, system, tools)) is not None:
        yield f"{named}: {chat.template.name} refuses: {problem}; name another with --template"


def _refusal(template: ChatTemplate, system: str | None, tools: Any) -> str | None:
    """Return why a template does not render a first message."""
    first = Conversation(system=system).with_message({"role": "user", "content": "Hello"})
    try:
        template.render(first.messages, tools, prompt=True)
    except TemplateRefusal as problem:
        return str(problem)
    return None
