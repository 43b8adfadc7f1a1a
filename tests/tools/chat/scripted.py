"""A chat with a model whose answers are known, and that keeps what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascend_run.ops.generation.engine import Engine, Request
from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.step import Step
from ascend_run.tools.chat.chat import Chat, ChatSettings
from ascend_run.tools.chat.conversation import Conversation, name_of
from ascend_run.tools.chat.prompts import Prompts
from ascend_run.tools.generate.chat_texts import ChatTexts, with_template
from ascend_run.tools.generate.session import Session
from ascend_run.tools.generate.texts import open_texts
from tests.support.chats import write_tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and '</think>' in message.content %}"  # as Qwen3's
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}"
    "{% if message.role == 'tool' %}({{ message.name }}, {{ message.tool_call_id }}){% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Reasoning of earlier answers is left out, and calls are written as Qwen's models do."""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "the sum",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
HELLO = {"type": "function", "function": {"name": "hello", "parameters": {"type": "object"}}}


class ScriptedSession(Session):
    """Gives answers in their order; each ends with an end token, unless it is too long."""

    def __init__(self, chat: ChatTexts, num_tokens: int, answers: Sequence[str]) -> None:
        self.cache = KeyValueCache(num_tokens)
        super().__init__(Engine(self._logits, self.cache, max_sequences=1), chat.texts)
        backend, (end, *_) = chat.texts.tokenizer.backend, sorted(chat.texts.end_ids)
        self.answers = [[*backend.encode(answer).ids, end] for answer in answers]
        self.vocab_size = chat.texts.tokenizer.vocab_size
        self.prompts: list[tuple[int, ...]] = []
        """Of all requests."""
        self.stored: list[int] = []
        """Tokens in the cache."""
        self.num_computed = 0
        self.on_token: Callable[[], object] = lambda: None

    def submit(self, request: Request, stop: Sequence[str] = ()) -> int:
        self.prompts.append(request.prompt)
        return super().submit(request, stop)

    def resume(self, number: int, request: Request, stop: Sequence[str] = ()) -> None:
        self.prompts.append(request.prompt)
        super().resume(number, request, stop)

    def _logits(self, step: Step) -> Tensor:
        (part,) = step.parts
        assert part.start <= len(self.stored)
        self.stored = [*self.stored[: part.start], *step.tokens_T.tolist()]
        self.num_computed += part.count
        self.on_token()
        logits_RV = torch.zeros(len(step.rows_R), self.vocab_size)
        if len(step.rows_R):
            answer, prompt = self.answers[len(self.prompts) - 1], self.prompts[-1]
            assert tuple(self.stored[: len(prompt)]) == prompt
            logits_RV[0, answer[len(self.stored) - len(prompt)]] = 1
        return logits_RV


def scripted(
    folder: Path,
    *answers: str,
    template: Any = TEMPLATE,
    tools: list[Any] | None = None,
    system: str | None = None,
    longest: int = 2000,
    max_new_tokens: int = 200,
    history_turns: int | None = None,
) -> tuple[Chat, ScriptedSession]:
    """Return a chat, and the session that answers."""
    write_tokenizer(folder, template)
    chat = with_template(open_texts(None, [folder], None), None, tools=tools is not None)
    session = ScriptedSession(chat, longest, answers)
    prompts = Prompts(
        chat=chat,
        tools=tools,
        history_turns=history_turns,
        longest=longest,
        room=min(max_new_tokens, longest // 4),
        vocab_size=session.vocab_size,
    )
    names = frozenset(map(name_of, tools or ()))
    settings = ChatSettings(max_new_tokens=max_new_tokens, tools=names)
    return Chat(session, prompts, settings, Conversation(system=system)), session
