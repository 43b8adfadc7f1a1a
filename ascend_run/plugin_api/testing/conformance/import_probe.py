"""Run as a program: import one module and print what that did, as one line of JSON.

    python import_probe.py SEARCH_PATH... MODULE

It stands on the standard library alone, and on the plugin API, which every plugin imports.
"""

from __future__ import annotations

import sys

MARK = "ascend-run import probe: "
_WRITING = ("w", "a", "x", "+")


def _state() -> dict[str, object]:
    """What a process has one of, name -> a value that compares."""
    import atexit
    import builtins
    import gc
    import logging
    import os
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
        "the working directory": os.getcwd(),
        "the mask of file modes": mask,
        "warnings.filters": tuple(warnings.filters),
        "warnings.showwarning": warnings.showwarning,
        "the root logger": (
            logging.root.level,
            tuple(map(id, logging.root.handlers)),
            logging.root.manager.disable,
        ),
        "the threads": tuple(thread.name for thread in threading.enumerate()),
        "threading.excepthook": threading.excepthook,
        "what runs at exit (atexit)": atexit._ncallbacks(),
        "the garbage collector": (gc.isenabled(), gc.get_threshold()),
        "the default socket timeout": socket.getdefaulttimeout(),
    }
    for number in signal.valid_signals():
        state[f"the handler of signal {number}"] = signal.getsignal(number)
    for name, value in os.environ.items():
        state[f"the environment variable {name}"] = value
    for name, value in vars(builtins).items():
        if name != "_":
            state[f"builtins.{name}"] = id(value)
    return state


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
            # A number is a file that is open already: what opened it was seen.
            writes = writes and not isinstance(path, int)
            if writes and "__pycache__" not in str(path) and str(path) != os.devnull:
                events.append(f"writes the file {path}")
        elif event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.chmod"):
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
    before = _state()
    watching, start = True, time.perf_counter()
    importlib.import_module(name)
    seconds, watching = time.perf_counter() - start, False
    after = _state()
    changes = [n for n in {**before, **after} if before.get(n, MARK) != after.get(n, MARK)]
    tops = sorted({module.partition(".")[0] for module in set(sys.modules) - loaded})
    sys.stdout.flush()
    sys.stdout = sys.__stdout__
    seen = {"modules": tops, "seconds": seconds, "events": events, "changes": changes}
    print(f"\n{MARK}{json.dumps(seen)}", flush=True)
    sys.stderr.flush()
    os._exit(0)  # whatever it left to be done at exit is told of, and not done


if __name__ == "__main__":
    main()
