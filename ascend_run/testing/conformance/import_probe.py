"""A script that imports one module and prints the side effects, as one line of JSON.

    python import_probe.py SEARCH_PATH... MODULE

It imports only the standard library, and the plugin API, which every plugin imports.
"""

from __future__ import annotations

import sys

MARK = "ascend-run import probe: "
_WRITING = ("w", "a", "x", "+")
_ON_FILES = frozenset(
    f"os.{call}"
    for call in (
        "mkdir",
        "remove",
        "rename",
        "rmdir",
        "chmod",
        "chown",
        "link",
        "symlink",
        "truncate",
    )
)


def process_state() -> dict[str, object]:
    """Return process-wide state: name -> a value that can be compared."""
    import atexit
    import faulthandler
    import gc
    import locale
    import logging
    import os
    import random
    import resource
    import signal
    import socket
    import threading
    import warnings

    mask = os.umask(0)
    os.umask(mask)
    state: dict[str, object] = {
        "sys.path": tuple(sys.path),
        "sys.meta_path": tuple(map(id, sys.meta_path)),
        "sys.path_hooks": tuple(map(id, sys.path_hooks)),
        "sys.excepthook": sys.excepthook,
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
        "the recursion limit": sys.getrecursionlimit(),
        "the trace function": (sys.gettrace(), sys.getprofile()),
        "the thread switch interval": sys.getswitchinterval(),
        "the working directory": os.getcwd(),
        "the mask of file modes": mask,
        "warnings.filters": tuple(warnings.filters),
        "warnings.showwarning": warnings.showwarning,
        "the root logger": (
            logging.root.level,
            tuple(map(id, logging.root.handlers)),
            logging.root.manager.disable,
        ),
        "the threads": tuple(sorted(thread.name for thread in threading.enumerate())),
        "threading.excepthook": threading.excepthook,
        "what runs at exit (atexit)": atexit._ncallbacks(),
        "the garbage collector": (gc.isenabled(), gc.get_threshold()),
        "the default socket timeout": socket.getdefaulttimeout(),
        "faulthandler": faulthandler.is_enabled(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "random.random": random.random,
        "an alarm": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "the priority": os.getpriority(os.PRIO_PROCESS, 0),
        "the limits of resources": tuple(
            resource.getrlimit(n) for name, n in vars(resource).items() if name[:7] == "RLIMIT_"
        ),
    }
    if hasattr(os, "sched_getaffinity"):
        state["the processors that it may use"] = tuple(sorted(os.sched_getaffinity(0)))
    return {**state, **_named_state()}


def _named_state() -> dict[str, object]:
    """Open files, signal handlers, environment variables and builtins, by name."""
    import builtins
    import os
    import signal

    state: dict[str, object] = {}
    for path, count in open_files().items():
        state[f"the open file {path}"] = count
    for number in signal.valid_signals():
        state[f"the handler of signal {number}"] = signal.getsignal(number)
    for name, value in os.environ.items():
        state[f"the environment variable {name}"] = value
    for name, value in vars(builtins).items():
        if name != "_":
            state[f"builtins.{name}"] = id(value)
    return state


def open_files() -> dict[str, int]:
    """Return file -> number of open descriptors; empty if the system has no /proc."""
    import os

    counts: dict[str, int] = {}
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:  # the folder itself
            continue
        if target.startswith("/"):  # not a socket or pipe, which threads may open at any time
            counts[target] = counts.get(target, 0) + 1
    return counts


def main() -> None:
    """Import the module that the command line names."""
    *search_path, name = sys.argv[1:]
    sys.path[:] = [path for path in search_path if path]

    import importlib
    import json
    import os
    import time

    import ascend_run.plugin_api  # noqa: F401

    events: list[str] = []
    watching = False

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if not watching:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(mode, str) and any(letter in mode for letter in _WRITING)
            writes = writes or (isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR)))
            # An integer is the descriptor of an open file, whose opening was reported.
            writes = writes and not isinstance(path, int)
            if writes and "__pycache__" not in str(path) and str(path) != os.devnull:
                events.append(f"writes the file {path}")
        elif event.startswith("os.") and event[3:] in _ON_FILES:
            if "__pycache__" not in str(arguments[0]):
                events.append(f"calls {event} on {arguments[0]}")
        elif event in ("subprocess.Popen", "os.system", "os.fork", "os.exec", "os.posix_spawn"):
            events.append(f"starts a process ({event})")
        elif event in ("socket.connect", "socket.bind", "socket.getaddrinfo"):
            events.append(f"uses the network ({event})")
        elif event == "_thread.start_new_thread":
            events.append("starts a thread")

    sys.addaudithook(watch)
    loaded = set(sys.modules)
    before = process_state()
    watching, start = True, time.perf_counter()
    importlib.import_module(name)
    seconds, watching = time.perf_counter() - start, False
    after = process_state()
    changes = [n for n in {**before, **after} if before.get(n, MARK) != after.get(n, MARK)]
    tops = sorted({module.partition(".")[0] for module in set(sys.modules) - loaded})
    sys.stdout.flush()
    sys.stdout = sys.__stdout__
    seen = {"modules": tops, "seconds": seconds, "events": events, "changes": changes}
    print(f"\n{MARK}{json.dumps(seen)}", flush=True)
    sys.stderr.flush()
    os._exit(0)  # atexit handlers are reported but not run


if __name__ == "__main__":
    main()
