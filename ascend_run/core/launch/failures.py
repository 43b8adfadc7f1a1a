"""What each failing rank leaves behind, and how that becomes one message.

A rank writes its failure to the file that torch's elastic agent names in an environment variable,
in that agent's format, so that torchrun shows it too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

import attrs

from ascend_run.core.files import replace_file
from ascend_run.plugin_api.errors import AscendRunError, RankFailure

FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
_OWN_KEY: Final = "ascend_run"
_LOST_PEER: Final = re.compile(
    r"connection (was )?(closed|reset|refused)|connection closed by peer|broken pipe|socket closed"
    r"|remote process exited|failed to recv|no route to host|peer.* (closed|exited)",
    re.IGNORECASE,
)


class RankRefusal(RankFailure):
    """A rank found what is the user's to mend."""

    exit_code: ClassVar[int] = 2


@attrs.frozen(kw_only=True)
class Failure:
    """How one rank ended."""

    rank: int
    time: float
    """Seconds since the epoch."""
    phase: str
    """``start`` while its modules are imported, then ``run``."""
    summary: str
    """One line."""
    text: str
    """The refusal with its reasons, or the traceback."""
    exit_code: int = 1
    is_refusal: bool = False
    lost_peer: bool = False
    """It only noticed that another rank was gone."""


def record_failure(error: BaseException, *, rank: int, phase: str = "run") -> None:
    """Write this rank's failure; of several calls the first counts.

    Call it where an error is first caught: what is torn down afterwards may make other ranks fail,
    and theirs must not look like the first failure.
    """
    path = os.environ.get(FILE_VARIABLE)
    if not path or Path(path).exists():
        return
    failure = describe_failure(error, rank=rank, phase=phase)
    extra = {"py_callstack": failure.text, "timestamp": str(int(failure.time))}
    content = {
        "message": {"message": failure.summary, "extraInfo": extra},
        _OWN_KEY: attrs.asdict(failure),
    }
    try:
        replace_file(Path(path), json.dumps(content))
    except OSError:
        # A full disk may be the very failure; the exit code still tells that there was one.
        print(f"rank {rank}: {failure.text}", flush=True)


def describe_failure(error: BaseException, *, rank: int, phase: str) -> Failure:
    """What an exception says of how a rank ended."""
    is_refusal = isinstance(error, AscendRunError)
    if isinstance(error, AscendRunError):
        text, exit_code = str(error), error.exit_code
        summary = error.headline
    elif isinstance(error, SystemExit):
        exit_code = error.code if isinstance(error.code, int) else 1
        text = summary = f"ended with exit code {exit_code}"
    else:
        exit_code = 1
        text = "".join(traceback.format_exception(error)).rstrip()
        summary = traceback.format_exception_only(error)[-1].strip()
    return Failure(
        rank=rank,
        time=time.time(),
        phase=phase,
        summary=_first_line(summary),
        text=text,
        exit_code=exit_code,
        is_refusal=is_refusal,
        lost_peer=_is_lost_peer(error),
    )


def read_failure(path: str | Path) -> Failure | None:
    """What a rank wrote; None where it wrote nothing, or not all of it."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return Failure(**content[_OWN_KEY])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def silent_failure(rank: int, exit_code: int, when: float) -> Failure:
    """A rank that ended without a word.

    Args:
        exit_code: As subprocess has it: a signal's number, negated.
        when: At which it was seen to be gone.
    """
    if exit_code >= 0:
        text = f"ended with exit code {exit_code}"
    else:
        text = f"was killed by {_signal_name(-exit_code)}"
        if -exit_code == signal.SIGKILL:
            text += ", as the system does when memory runs out"
    return Failure(rank=rank, time=when, phase="run", summary=text, text=text)


def summarize(failures: Sequence[Failure]) -> RankFailure:
    """One error of all failures: the earliest in full, then the others in a line each.

    One that only lost its peers is never the earliest while there is another.
    """
    first, *others = sorted(failures, key=_order)
    lines = [opening(first, first.text), *(_one_line(other, first) for other in others)]
    kind = RankRefusal if first.is_refusal and first.exit_code == 2 else RankFailure
    return kind("\n".join(lines))


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The one that ``summarize`` tells in full."""
    return min(failures, key=_order)


def opening(failure: Failure, text: str) -> str:
    """A rank and what is said of it: ``rank 1 was killed``, ``rank 1: ValueError``."""
    silent = text.startswith(("was killed", "ended with"))
    return f"rank {failure.rank} {text}" if silent else f"rank {failure.rank}: {text}"


def _order(failure: Failure) -> tuple[bool, float]:
    return failure.lost_peer, failure.time


def _one_line(other: Failure, first: Failure) -> str:
    if other.summary == first.summary:
        return f"rank {other.rank}: the same"
    if other.lost_peer and not first.lost_peer:
        return f"rank {other.rank} then lost its connection to another rank"
    return f"rank {other.rank}: {other.summary}"


def _is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or the one that it was raised from, tells of a connection that broke."""
    while error is not None:
        if isinstance(error, ConnectionError):
            return True
        if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
            return True
        error = error.__cause__
    return False


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
