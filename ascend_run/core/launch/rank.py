"""The process of one rank that our agent started: ``python -m ascend_run.core.launch.rank``.

It ends with its launcher, whatever becomes of that one, and leaves its failure in a file.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Final, NoReturn

from .failures import describe_failure, record_failure

TARGET_VARIABLE: Final = "ASCEND_RUN_TARGET"
REQUEST_VARIABLE: Final = "ASCEND_RUN_REQUEST"
LAUNCHER_VARIABLE: Final = "ASCEND_RUN_LAUNCHER"
ATTEMPT_VARIABLE: Final = "ASCEND_RUN_ATTEMPT"
"""Which start of all ranks this is, the same on every node."""
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Import the target, call it with the request."""
    _end_with_launcher()
    rank = int(os.environ["RANK"])
    phase = "start"
    try:
        module, _, function = os.environ[TARGET_VARIABLE].partition(":")
        target = getattr(importlib.import_module(module), function)
        request = json.loads(os.environ[REQUEST_VARIABLE])
        phase = "run"
        target(request)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        record_failure(error, rank=rank, phase=phase)
        _leave(describe_failure(error, rank=rank, phase=phase).exit_code)


def _end_with_launcher() -> None:
    """Have the kernel kill this process when its launcher is gone, even if that was killed."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ[LAUNCHER_VARIABLE]):  # it was gone before we asked
        os._exit(1)


def _leave(exit_code: int) -> NoReturn:
    """End at once: waiting for threads and destructors may mean waiting for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
