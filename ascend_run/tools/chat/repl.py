"""Read what a user says, and answer: messages, and commands about the conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Final

import attrs

from .chat import Chat
from .conversation import Message, name_of, result_message, user_message
from .printing import Printer, note
from .prompts import MessageRefused

_EXIT: Final = frozenset({"/exit", "/quit", "/q", "exit", "quit", "q"})
_CLEAR: Final = frozenset({"/clear", "/new", "clear", "new"})
_HELP: Final = """\
/clear               forget what was said; clear, new
/system TEXT         replace the system message; without TEXT there is none
/tool NAME RESULT    give the result of a call
/help                this list
/exit                leave; exit, quit, q, Ctrl-D
A line that ends with \\ continues in the next one. A message may begin with / after a space.
Ctrl-C ends an answer."""
Interrupts = Callable[[], AbstractContextManager[Callable[[], bool]]]


class _Leave(Exception):
    """The user leaves."""


@attrs.define(kw_only=True, eq=False)
class Repl:
    """Answers entries, one after the other."""

    chat: Chat
    printer: Printer
    interrupts: Interrupts
    """Opened for each answer; whether it is to end."""
    has_template: bool
    num_refused: int = 0
    """Entries that could not be answered."""
    _commands: Mapping[str, Callable[[str], None]] = attrs.field(init=False)
    _told: set[str] = attrs.field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self._commands = {"/help": self._help, "/system": self._system, "/tool": self._tool}

    def run(self, entries: Iterable[str]) -> None:
        """Answer entries until the user leaves, or there are none."""
        for entry in entries:
            try:
                self._take(entry)
            except _Leave:
                return
            except MessageRefused as problem:
                self.num_refused += 1
                self.printer.refuse(entry, str(problem))

    def _take(self, entry: str) -> None:
        line = entry.strip()
        if not line:
            return
        if line in _EXIT:
            raise _Leave
        if line in _CLEAR:
            self.chat.conversation = attrs.evolve(self.chat.conversation, turns=())
            return
        if not entry.startswith("/"):
            self._answer(entry, user_message(entry))
            return
        word, _, rest = line.partition(" ")
        if (command := self._commands.get(word)) is None:
            raise MessageRefused(
                f"there is no command {word}; /help lists them, and a message may begin with / "
                "after a space"
            )
        command(rest.strip())

    def _help(self, rest: str) -> None:
        note(_HELP)

    def _system(self, rest: str) -> None:
        if not self.has_template:
            raise MessageRefused("/system needs a chat template, and there is none")
        self.chat.conversation = attrs.evolve(self.chat.conversation, system=rest or None)

    def _tool(self, rest: str) -> None:
        name, _, result = rest.partition(" ")
        calls = self.chat.conversation.open_calls
        call = next((call for call in calls if name_of(call) == name), None)
        if call is None:
            names = ", ".join(map(name_of, calls))
            expected = f"expected one of {names}" if names else "the last answer has none"
            raise MessageRefused(f"/tool {name}: no call without a result; {expected}")
        message = result_message(call, result.strip())
        if len(calls) > 1:
            self.chat.conversation = self.chat.conversation.with_message(message)
        else:
            self._answer(f"/tool {rest}", message)

    def _answer(self, said: str, message: Message) -> None:
        if any("\ud800" <= letter <= "\udfff" for letter in said):
            raise MessageRefused("it is no text in UTF-8")
        with self.interrupts() as is_interrupted:
            answer = self.chat.answer(message, self.printer.add, is_interrupted)
        self.printer.end(said, answer)
        if answer.num_dropped:
            self._say_once("the oldest turns are dropped: they do not fit into the longest text")
        if answer.calls:
            self._say_once("give results of calls with /tool NAME RESULT")

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            note(text)
