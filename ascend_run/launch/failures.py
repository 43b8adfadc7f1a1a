"""Summarize the failures of several ranks in one error."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import ClassVar

from ascend_run.core.rank.failures import Failure
from ascend_run.plugin_api.errors import RankFailure


class RankRefusal(RankFailure):
    """A rank failed with an error that the user can fix."""

    exit_code: ClassVar[int] = 2


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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
