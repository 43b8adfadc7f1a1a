"""Runs copies of the package that lack plugins: ``removal_driver.py REQUEST``, a JSON file.

A request is ``{"heavy": [module, ...], "trees": [{"folder", "commands": {name: [word, ...]},
"output"}, ...]}``. The heavy modules, all third-party, are imported once; then each copy runs in a
process forked from this one, and writes its results to its output.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> int:
    gc.disable()  # imports leave little garbage, and collections take seconds
    request = json.loads(Path(sys.argv[1]).read_text())
    for name in request["heavy"]:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.partition(".")[0] == "ascend_run"]
    failed = [tree["folder"] for tree in request["trees"] if not _in_child(tree)]
    print("failed:", *failed)
    return len(failed)


def _in_child(tree: dict[str, Any]) -> bool:
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    code = 1
    try:
        Path(tree["output"]).write_text(json.dumps(_use(tree)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _use(tree: dict[str, Any]) -> dict[str, Any]:
    """Return where the package was found, which modules failed to import, and each command's
    result."""
    sys.path.insert(0, tree["folder"])
    os.chdir(tree["folder"])
    package = importlib.import_module("ascend_run")
    cli = importlib.import_module("ascend_run.entrypoints.cli")
    return {
        "package": package.__file__,
        "broken": dict(_broken_modules(package)),
        "commands": {name: _answer(cli, words) for name, words in tree["commands"].items()},
    }


def _broken_modules(package: Any) -> Iterator[tuple[str, str]]:
    """Yield modules of the package that cannot be imported, and why."""
    for module in pkgutil.walk_packages(package.__path__, "ascend_run."):
        if module.name == "ascend_run.__main__":  # it runs the command line
            continue
        try:
            importlib.import_module(module.name)
        except Exception as error:
            yield module.name, f"{type(error).__name__}: {error}"


def _answer(cli: Any, words: list[str]) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.run(words)
        except Exception:  # a bug in this command; the others run all the same
            code = 1
            traceback.print_exc()
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    sys.exit(main())
