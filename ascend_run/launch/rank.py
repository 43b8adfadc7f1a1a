"""Process of one rank started by our agent: ``python -m ascend_run.launch.rank``.

It ends when its launcher ends, and writes its failure to a file.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

from ascend_run.core.rank.failures import describe_failure, record_failure

TARGET_VARIABLE: Final = "ASCEND_RUN_TARGET"
REQUEST_VARIABLE: Final = "ASCEND_RUN_REQUEST_FILE"
LAUNCHER_VARIABLE: Final = "ASCEND_RUN_LAUNCHER"
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Import the target and call it with the request."""
    _end_with_launcher()
    rank = int(os.environ["RANK"])
    phase = "start"
    try:
        module, _, function = os.environ[TARGET_VARIABLE].partition(":")
        target = getattr(importlib.import_module(module), function)
        request = json.loads(Path(os.environ[REQUEST_VARIABLE]).read_text(encoding="utf-8"))
        phase = "run"
        target(request)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        record_failure(error, rank=rank, phase=phase)
        _leave(describe_failure(error, rank=rank, phase=phase).exit_code)


def _end_with_launcher() -> None:
    """Ask the OS kernel to kill this process when its launcher ends, even by SIGKILL."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ[LAUNCHER_VARIABLE]):  # the launcher ended before the call
        os._exit(1)


def _leave(exit_code: int) -> NoReturn:
    """Exit at once; waiting for threads and destructors could block on ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
