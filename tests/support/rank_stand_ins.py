"""Fake ranks, for tests of the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ascend_run.plugin_api import DataError

Request = dict[str, Any]


def _rank() -> int:
    return int(os.environ["RANK"])


def write_environment(request: Request) -> None:
    """Write this rank's environment to a file."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    names += ("ASCEND_RUN_ATTEMPT",)
    seen = {name: os.environ.get(name) for name in names}
    path = Path(request["folder"]) / f"rank{_rank()}.json"
    path.write_text(json.dumps({**seen, "text": request.get("text")}))


def hang(request: Request) -> None:
    """Write the process id and hang."""
    _leave_pid(request, f"rank{_rank()}.pid")
    time.sleep(600)


def meet_and_hang(request: Request) -> None:
    """Connect with every other rank as a run does, in two groups, then hang."""
    import datetime

    import torch
    import torch.distributed as dist

    from ascend_run.core.rank.default_group import default_group
    from ascend_run.plugin_api import Layout

    layout = Layout(world_size=int(os.environ["WORLD_SIZE"]), rank=_rank())
    with default_group(layout, "gloo", datetime.timedelta(seconds=30)):
        for group in (dist.group.WORLD, dist.new_group()):
            dist.all_reduce(torch.ones(1), group=group)
        hang(request)


def hang_deaf(request: Request) -> None:
    """Hang like ``hang``, with a child that ignores SIGTERM; so does rank 0 itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a child inherits ignored signals
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if _rank() != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Path(request["folder"], f"child{_rank()}.pid").write_text(str(child.pid))
    hang(request)


def fail_on_1(request: Request) -> None:
    """Rank 1 has a bug, the others hang."""
    if _rank() == 1:
        _wait_for_the_others(request)
        raise ValueError("the bug of rank 1")
    hang(request)


def refuse_on_1(request: Request) -> None:
    """Rank 1 finds a user error."""
    if _rank() == 1:
        raise DataError("the dataset is corrupt", ["file x: truncated", "file y: foreign"])
    hang(request)


def refuse_everywhere(request: Request) -> None:
    """Every rank finds the same user error."""
    raise DataError("the dataset is corrupt")


def exit_3_on_1(request: Request) -> None:
    """Rank 1 exits by sys.exit."""
    if _rank() == 1:
        sys.exit(3)
    hang(request)


def vanish_on_1(request: Request) -> None:
    """Rank 1 exits without a message."""
    if _rank() == 1:
        os._exit(5)
    hang(request)


def die_on_1(request: Request) -> None:
    """Rank 1 is killed as by the system; rank 0 notices a broken connection at once."""
    if _rank() == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    _lose_peer(after_seconds=1.2)


def fail_slowly_on_1(request: Request) -> None:
    """Rank 1 fails first, but its failure is written after a long teardown."""
    if _rank() == 1:
        try:
            raise ValueError("the first failure")
        finally:
            time.sleep(1)
    _lose_peer(after_seconds=0.2)


def fail_and_never_end_on_1(request: Request) -> None:
    """Rank 1 reports its failure, then hangs in teardown."""
    from ascend_run.core.rank.failures import record_failure

    if _rank() == 1:
        try:
            raise ValueError("the reported failure")
        except ValueError as error:
            record_failure(error, rank=1)
            time.sleep(600)
    hang(request)


def fail_once(request: Request) -> None:
    """Rank 1 fails on the first attempt and not on the next."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        fail_on_1(request)
    write_environment(request)


def _lose_peer(after_seconds: float) -> None:
    time.sleep(after_seconds)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")


def _is_there(request: Request, name: str) -> bool:
    return Path(request["folder"], name).exists()


def _leave_pid(request: Request, name: str) -> None:
    Path(request["folder"], name).write_text(str(os.getpid()))


def _wait_for_the_others(request: Request) -> None:
    size = int(os.environ["WORLD_SIZE"])
    others = [f"rank{rank}.pid" for rank in range(size) if rank != _rank()]
    for _ in range(600):
        if all(_is_there(request, name) for name in others):
            return
        time.sleep(0.05)
