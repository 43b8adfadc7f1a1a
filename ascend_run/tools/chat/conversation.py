"""The messages of a chat, in turns. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

Message = Mapping[str, Any]
"""``role``, ``content`` and others, as chat templates read them."""
Turn = tuple[Message, ...]
"""A message of the user, and what follows it up to the next one."""


def name_of(call: Mapping[str, Any]) -> str:
    """Return the name of the function of a call, or of a tool."""
    name: str = call["function"]["name"]
    return name


def user_message(text: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def result_message(call: Mapping[str, Any], result: str) -> Message:
    """Return the message with the result of a call."""
    return {"role": "tool", "name": name_of(call), "tool_call_id": call["id"], "content": result}


@attrs.frozen(kw_only=True)
class Conversation:
    """A system message, if there is one, and turns."""

    system: str | None = None
    turns: tuple[Turn, ...] = ()

    def with_message(self, message: Message) -> Conversation:
        """Return it with one more message; one of the user begins a turn."""
        if message["role"] == "user":
            return attrs.evolve(self, turns=(*self.turns, (message,)))
        *before, last = self.turns
        return attrs.evolve(self, turns=(*before, (*last, message)))

    def last_turns(self, number: int) -> Conversation:
        """Return it without its older turns; the system message stays."""
        return attrs.evolve(self, turns=self.turns[max(len(self.turns) - number, 0) :])

    @property
    def messages(self) -> list[Message]:
        """All messages in order."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *(message for turn in self.turns for message in turn)]

    @property
    def open_calls(self) -> list[Mapping[str, Any]]:
        """Calls of the last answer that have no results."""
        return [*_open_calls(self.turns[-1])] if self.turns else []


def _open_calls(turn: Turn) -> Iterator[Mapping[str, Any]]:
    answer = max(at for at, message in enumerate(turn) if message["role"] != "tool")
    results = {message["tool_call_id"] for message in turn[answer + 1 :]}
    for call in turn[answer].get("tool_calls", ()):
        if call["id"] not in results:
            yield call
