"""Record how this rank failed.

A rank writes its failure to the file that torch's elastic agent names in an environment variable,
in the agent's format, so that torchrun reports it too.
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from pathlib import Path
from typing import Final

import attrs

from ascend_run.core.files import replace_file
from ascend_run.core.hook_errors import hook_call_of
from ascend_run.plugin_api.errors import AscendRunError

FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
_OWN_KEY: Final = "ascend_run"
_LOST_PEER: Final = re.compile(
    r"connection (was )?(closed|reset|refused)|connection closed by peer|broken pipe|socket closed"
    r"|remote process exited|failed to recv|no route to host|peer.* (closed|exited)",
    re.IGNORECASE,
)


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
        summary = _without_notes(error)
    call = hook_call_of(error)
    return Failure(
        rank=rank,
        time=time.time(),
        phase=phase,
        summary=_first_line(summary) + ("" if call is None else f"; {call}"),
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


def _is_lost_peer(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is a broken connection."""
    while error is not None:
        if isinstance(error, ConnectionError):
            return True
        if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
            return True
        error = error.__cause__
    return False


def _without_notes(error: BaseException) -> str:
    """Return the type and message of an exception, as the last line of a traceback has them."""
    described = traceback.TracebackException.from_exception(error)
    described.__notes__ = None
    return [*described.format_exception_only()][-1].strip()


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
