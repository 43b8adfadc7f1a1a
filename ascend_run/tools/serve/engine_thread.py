"""The engine in a thread of its own, and its answers in the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import attrs
import torch

from ascend_run.ops.generation.engine import Request
from ascend_run.tools.generate.session import Piece


class Sequences(Protocol):
    """The methods of a session; each is called from the same thread."""

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits or runs."""

    def submit(self, request: Request, stop: Sequence[str] = ()) -> int:
        """Queue a request and return its number."""

    def cancel(self, number: int) -> None:
        """End a sequence, if it has not ended."""

    def step(self) -> list[Piece]:
        """Run one forward and return what it adds."""


class EngineFailed(Exception):
    """The engine has failed and answers no more; its cause is the reason."""


@attrs.define(eq=False)
class Ticket:
    """A request that the engine answers; used in the event loop alone."""

    request: Request
    stop: tuple[str, ...]
    most_unread: int | None
    """Pieces that wait for the reader; with one more it is too slow. None: as many as come."""
    too_slow: asyncio.Event = attrs.field(factory=asyncio.Event)
    is_complete: bool = False
    _pieces: list[Piece] = attrs.field(factory=list)
    _ready: asyncio.Event = attrs.field(factory=asyncio.Event)
    _failed: bool = False

    async def pieces(self) -> list[Piece]:
        """Wait for the pieces that came since the last call, at least one.

        Raises:
            EngineFailed: There will be none.
        """
        await self._ready.wait()
        self._ready.clear()
        if self._failed:
            raise EngineFailed
        pieces, self._pieces = self._pieces, []
        return pieces

    def add(self, piece: Piece) -> None:
        """Take a piece of the engine."""
        self.is_complete = piece.finish is not None
        if len(self._pieces) == self.most_unread:
            self.too_slow.set()
            return
        self._pieces.append(piece)
        self._ready.set()

    def fail(self) -> None:
        """Note that the engine has failed."""
        self._failed = True
        self._ready.set()


class EngineThread:
    """Runs a session while requests are there; a context, which ends the thread.

    Requests and cancellations reach the thread by a queue, and are taken between two steps. What a
    step adds to all answers reaches the event loop by one call.
    """

    def __init__(self, session: Sequences) -> None:
        self.on_failure: Callable[[], object] = lambda: None
        """Called in the event loop if the engine fails."""
        self.failure: BaseException | None = None
        self.open: set[Ticket] = set()
        """Tickets that have not been closed; used in the event loop alone."""
        self._session = session
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.put(self._end)
        self._thread.join()

    @property
    def is_idle(self) -> bool:
        """Whether the thread knows of no request."""
        return self._inbox.empty() and not self._tickets

    def submit(
        self, request: Request, stop: tuple[str, ...] = (), most_unread: int | None = None
    ) -> Ticket:
        """Hand a request over; called in the event loop.

        Raises:
            EngineFailed: The engine has failed.
        """
        if self.failure is not None:
            raise EngineFailed
        self._loop = asyncio.get_running_loop()
        ticket = Ticket(request=request, stop=stop, most_unread=most_unread)
        self.open.add(ticket)
        self._inbox.put(lambda: self._begin(ticket))
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Forget a ticket; if its answer is not complete, the engine ends it. In the event loop."""
        self.open.discard(ticket)
        if not ticket.is_complete:
            self._inbox.put(lambda: self._cancel(ticket))

    def _run(self) -> None:
        try:
            with torch.no_grad():  # which is a setting of each thread
                while not self._is_ending:
                    self._take()
                    if not self._is_ending:
                        self._deliver(self._session.step())
        except BaseException as problem:
            self.failure = problem
            self._tell(self._fail_all)

    def _take(self) -> None:
        """Do what came by the queue; wait for it if there is nothing else to do."""
        if self._session.is_idle:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _begin(self, ticket: Ticket) -> None:
        self._tickets[self._session.submit(ticket.request, ticket.stop)] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        for number in [number for number, one in self._tickets.items() if one is ticket]:
            del self._tickets[number]
            self._session.cancel(number)

    def _end(self) -> None:
        self._is_ending = True

    def _deliver(self, pieces: Sequence[Piece]) -> None:
        pairs = [(self._tickets[piece.emitted.sequence], piece) for piece in pieces]
        for piece in pieces:
            if piece.finish is not None:
                del self._tickets[piece.emitted.sequence]
        if pairs:
            self._tell(lambda: _add(pairs))

    def _tell(self, call: Callable[[], object]) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop has been closed
            self._is_ending = True

    def _fail_all(self) -> None:
        for ticket in self.open:
            ticket.fail()
        self.on_failure()


def _add(pairs: Sequence[tuple[Ticket, Piece]]) -> None:
    for ticket, piece in pairs:
        ticket.add(piece)
