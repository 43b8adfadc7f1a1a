"""Measure which code of platform npu the tests of its arithmetic run, by line and by branch.

    python tools/npu_coverage.py    # some minutes; writes tests/plugins/npu/code_paths.json

What a test has run is kept under ``build/npu_coverage``: stopped at any moment, the same command
goes on with the tests that are left, and one that has changed is run again.

Measured is every module of ``ascend_run/plugins/npu`` but ``proof``, which never runs in training.
``TESTS`` compare what the code computes with a formula, with the torch form or with the CPU, in
their own process and on the ranks of the pool; nothing else counts as a proof. What they do not run
has to be a refusal (a ``raise`` and what leads to nothing else), or stand in ``EXEMPT`` with a
reason. The record keeps a fingerprint of each module and test, without comments and documentation:
``tests/plugins/npu/test_code_paths.py`` fails where one has changed since, where a path is left
over, and where an exemption is not needed any more.

It serves as pytest's plugin too, so that ranks end by themselves and say what they have run.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
PACKAGE: Final = ROOT / "ascend_run/plugins/npu"
OUTPUT: Final = ROOT / "tests/plugins/npu/code_paths.json"
CACHE: Final = ROOT / "build/npu_coverage"
DONE: Final = "done"
TESTS: Final = tuple(
    f"tests/plugins/npu/{name}.py"
    for name in (
        "test_forms",
        "test_attention",
        "test_linear",
        "test_platform_ops",
        "test_device",
        "test_releases",
        "test_device_path",
        "test_parity",
    )
)
EXEMPT: Final[Mapping[str, str]] = {}
"""``module: line`` as it stands in the source -> why no test of the arithmetic runs it."""


def modules() -> Iterator[Path]:
    """What is measured."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "proof" not in path.parts:
            yield path


def fingerprint(path: Path) -> str:
    """Of the code, whatever its comments, documentation and layout."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # Many kinds of nodes have a body, and ast names no type for them.
            node.body = [part for part in body if not _is_text(part)]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def refusals(source: str) -> set[int]:
    """Lines that only lead to an exception, and imports for types alone."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise):
            found |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        for block in (getattr(node, name, None) for name in ("body", "orelse", "handlers")):
            if isinstance(block, list) and block and isinstance(block[-1], ast.Raise):
                if isinstance(node, ast.FunctionDef | ast.Module):
                    continue  # a function that always raises is measured up to there
                found |= {*range(block[0].lineno, (block[-1].end_lineno or 0) + 1)}
        if isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise):
            found.add(node.lineno)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return found


def record(path: Path, measured: Mapping[str, Any]) -> dict[str, Any]:
    """One module: what is in it, what is exempt and why, and what is left over."""
    source = path.read_text(encoding="utf-8")
    lines, refused = source.splitlines(), refusals(source)
    exempt: dict[str, str] = {}
    missing: list[str] = []
    not_run = {*measured["missing_lines"]}
    for number in sorted(not_run):
        _judge(path, lines, number, number in refused, lines[number - 1].strip(), exempt, missing)
    for start, end in measured["missing_branches"]:
        if abs(end) in not_run or start in not_run:
            continue  # told of already
        text = f"{lines[start - 1].strip()} -> {lines[end - 1].strip() if end > 0 else 'the end'}"
        _judge(path, lines, start, end in refused or start in refused, text, exempt, missing)
    summary = measured["summary"]
    return {
        "code": fingerprint(path),
        "lines": summary["num_statements"],
        "branches": summary["num_branches"],
        "refusals": sum(number in refused for number in not_run),
        "exempt": exempt,
        "missing": missing,
    }


def _judge(
    path: Path,
    lines: list[str],
    number: int,
    is_refusal: bool,
    text: str,
    exempt: dict[str, str],
    missing: list[str],
) -> None:
    key = f"{path.relative_to(PACKAGE).as_posix()}: {text}"
    if is_refusal:
        return
    if key in EXEMPT:
        exempt[key] = EXEMPT[key]
    else:
        missing.append(f"{number}: {text}")


def measure() -> dict[str, Any]:
    """coverage's report of all tests, each run once for this code.

    Raises:
        SystemExit: A test failed.
    """
    code = hashlib.sha256("".join(map(fingerprint, modules())).encode()).hexdigest()[:8]
    folders = [CACHE / f"{Path(test).stem}-{fingerprint(ROOT / test)}-{code}" for test in TESTS]
    for test, folder in zip(TESTS, folders, strict=True):
        if (folder / DONE).exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        what = ["-m", "pytest", "-q", "-p", "tools.npu_coverage", "-p", "no:cacheprovider", test]
        if _coverage(folder, "run", *what) != 0:
            sys.exit(f"{test} has to pass first")
        (folder / DONE).touch()
    report = CACHE / "report.json"
    _coverage(CACHE, "combine", "-q", "--keep", *map(str, folders))
    _coverage(CACHE, "json", "-q", "-o", str(report))
    answer: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return answer


def _coverage(folder: Path, *words: str) -> int:
    """A command of coverage's on the data in a folder."""
    settings = folder / "settings"
    settings.write_text(
        "[run]\nbranch = true\nparallel = true\npatch = subprocess\n"
        f"data_file = {folder / 'data'}\nsource = {PACKAGE}\nomit = */proof/*\n",
        encoding="utf-8",
    )
    (command, *rest) = words
    call = [sys.executable, "-m", "coverage", command, f"--rcfile={settings}", *rest]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(call, cwd=ROOT, env=environment).returncode


def pytest_configure() -> None:
    """Let a rank end by itself, which it does when its pipe is closed."""
    from ascend_run.plugin_api.testing.pool import GlooPool

    at_once = GlooPool.close

    def close(self: GlooPool) -> None:
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            try:
                worker.process.wait(30)
            except subprocess.TimeoutExpired:
                print(f"{worker.process.pid} says nothing", file=sys.stderr)
        at_once(self)

    # For this process, which only measures: a rank that is killed writes no record of its lines.
    GlooPool.close = close  # type: ignore[method-assign]


def main() -> None:
    report = measure()
    files = {(ROOT / name).resolve(): content for name, content in report["files"].items()}
    names = {path: path.relative_to(PACKAGE).as_posix() for path in modules()}
    content = {
        "tests": {name: fingerprint(ROOT / name) for name in TESTS},
        "modules": {name: record(path, files[path.resolve()]) for path, name in names.items()},
    }
    OUTPUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    left = {name: r["missing"] for name, r in content["modules"].items() if r["missing"]}
    total = {key: sum(r[key] for r in content["modules"].values()) for key in ("lines", "branches")}
    print(f"{OUTPUT.relative_to(ROOT)}: {total['lines']} lines, {total['branches']} branches")
    for name, missing in left.items():
        print(f"{name}:", *missing, sep="\n  ")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
