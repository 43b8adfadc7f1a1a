"""The store of a run, as a process that connects to it meets it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

CONNECT = """
import datetime, sys
from ascend_run.core.rank.store import connect_store

print("connecting", flush=True)
connect_store("127.0.0.1", int(sys.argv[1]), datetime.timedelta(seconds=600))
"""


def test_ctrl_c_ends_a_process_that_waits_for_a_store() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # and not listening
        command = [sys.executable, "-c", CONNECT, str(unheard.getsockname()[1])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "connecting\n"
                time.sleep(0.5)  # into the wait
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=30)
            finally:
                process.kill()
    assert process.returncode == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
