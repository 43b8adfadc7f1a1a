"""Record how each rank failed, and summarize the failures in one error.

A rank writes its failure to the file that torch's elastic agent names in an environment variable,
in the agent's format, so that torchrun reports it too.
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
    """A rank failed with an error that the user can fix."""

    exit_code: ClassVar[int] = 2


@attrs.frozen(kw_only=True)
class Failure:
    """How one rank ended."""

    rank: int
    time: float
    """Seconds since the epoch."""
    phase: str
    """``start`` during imports, then ``run``."""
    summary: str
    """One line."""
    text: str
    """The error message with its problems, or the traceback."""
    exit_code: int = 1
    is_refusal: bool = False
    lost_peer: bool = False
    """The rank failed only because its connection to another rank broke."""


def record_failure(error: BaseException, *, rank: int, phase: str = "run") -> None:
    """Write this rank's failure. Only the first call has an effect.

    Call it where the error is first caught: the teardown that follows may make other ranks fail,
    and their failures must not look like the first one.
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
        # A full disk may be the cause; the exit code still reports the failure.
        print(f"rank {rank}: {failure.text}", flush=True)


def describe_failure(error: BaseException, *, rank: int, phase: str) -> Failure:
    """Describe how a rank ended, from its exception."""
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
    """Read the failure of a rank; return None if the file is missing or incomplete."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return Failure(**content[_OWN_KEY])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def silent_failure(rank: int, exit_code: int, when: float) -> Failure:
    """Describe a rank that ended without a report.

    Args:
        exit_code: As in subprocess; a negative number is a signal.
        when: Time at which the exit was noticed. Unit: seconds since the epoch.
    """
    if exit_code >= 0:
        text = f"ended with exit code {exit_code}"
    else:
        text = f"was killed by {_signal_name(-exit_code)}"
        if -exit_code == signal.SIGKILL:
            text += ", as the system does when memory runs out"
    return Failure(rank=rank, time=when, phase="run", summary=text, text=text)


def summarize(failures: Sequence[Failure]) -> RankFailure:
    """Summarize failures in one error: the first in full, the others in one line each.

    A rank that only lost a peer counts as first only if all did.
    """
    first, *others = sorted(failures, key=_order)
    lines = [opening(first, first.text), *(_one_line(other, first) for other in others)]
    kind = RankRefusal if first.is_refusal and first.exit_code == 2 else RankFailure
    return kind("\n".join(lines))


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that ``summarize`` reports in full."""
    return min(failures, key=_order)


def opening(failure: Failure, text: str) -> str:
    """Prefix a message with its rank: ``rank 1 was killed``, ``rank 1: ValueError``."""
    silent = text.startswith(("was killed", "ended with"))
    return f"rank {failure.rank} {text}" if silent else f"rank {failure.rank}: {text}"


def _order(failure: Failure) -> tuple[bool, float]:
    return failure.lost_peer, failure.time


def _one_line(other: Failure, first: Failure) -> str:
    if other.summary == first.summary:
        return f"rank {other.rank}: same error"
    if other.lost_peer and not first.lost_peer:
        return f"rank {other.rank} then lost its connection to another rank"
    return f"rank {other.rank}: {other.summary}"


def _is_lost_peer(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is a broken connection."""
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
