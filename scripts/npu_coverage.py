"""Measure line and branch coverage of platform npu by its arithmetic tests.

    python scripts/npu_coverage.py    # some minutes

It writes ``tests/plugins/platforms/npu/code_paths.json``.

The coverage of each test is stored under ``build/npu_coverage``. If interrupted, the same command
continues with the remaining tests; tests that have changed are run again.

All modules of ``ascend_run/plugins/platforms/npu`` are measured, except ``proof``, which never runs
in training. ``TESTS`` compare results with a formula, with the reference implementation or with the
CPU, in their own process and on the ranks of the pool; no other tests count. Code that they do not
run must only lead to an exception (a ``raise``), or be listed in ``EXEMPT`` with a reason. The
record has a fingerprint of each module and test, without comments and docstrings:
``tests/plugins/platforms/npu/test_code_paths.py`` fails if one has changed since, if a path is not
covered, or if an exemption is not needed any more.

This module is also a pytest plugin that lets ranks exit by themselves, to write their coverage.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
PACKAGE: Final = ROOT / "ascend_run/plugins/platforms/npu"
OUTPUT: Final = ROOT / "tests/plugins/platforms/npu/code_paths.json"
CACHE: Final = ROOT / "build/npu_coverage"
DONE: Final = "done"
EXIT_SECONDS: Final = 60.0
"""Time for a rank to write its coverage."""
TESTS: Final = tuple(
    f"tests/plugins/platforms/npu/{name}.py"
    for name in (
        "test_forms",
        "test_attention",
        "test_linear",
        "test_platform_ops",
        "test_swapped_memory",
        "test_device",
        "test_releases",
        "test_device_path",
        "test_parity",
    )
)
EXEMPT: Final[Mapping[str, str]] = {}
"""``module: source line`` -> why no arithmetic test runs it."""


def modules() -> Iterator[Path]:
    """Yield the measured modules."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "proof" not in path.parts:
            yield path


def fingerprint(path: Path) -> str:
    """Return a fingerprint of the code, without comments, docstrings and formatting; the same in
    each version of Python."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # Many node types have a body, but ast has no common type for them.
            node.body = [part for part in body if not _is_text(part)]  # type: ignore[attr-defined]
    return hashlib.sha256(repr(outline(tree)).encode()).hexdigest()[:16]


def outline(node: object) -> object:
    """Return nested lists of what a tree holds, without empty fields: later versions of Python have
    more of these."""
    if isinstance(node, list):
        return [outline(part) for part in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, outline(value)) for name, value in ast.iter_fields(node))
    return [type(node).__name__, *([name, held] for name, held in fields if held)]


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def refusals(source: str) -> set[int]:
    """Return lines that only lead to an exception, and imports for type checking."""
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
    """Return the record of one module: coverage, exemptions with reasons, and uncovered lines."""
    source = path.read_text(encoding="utf-8")
    lines, refused = source.splitlines(), refusals(source)
    exempt: dict[str, str] = {}
    missing: list[str] = []
    not_run = {*measured["missing_lines"]}
    for number in sorted(not_run):
        _judge(path, lines, number, number in refused, lines[number - 1].strip(), exempt, missing)
    for start, end in measured["missing_branches"]:
        if abs(end) in not_run or start in not_run:
            continue  # already reported
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
    """Return the coverage report of all tests, each of which is run once for this code.

    Raises:
        SystemExit: A test failed.
    """
    code = hashlib.sha256("".join(map(fingerprint, modules())).encode()).hexdigest()[:8]
    folders = [CACHE / f"{Path(test).stem}-{fingerprint(ROOT / test)}-{code}" for test in TESTS]
    for test, folder in zip(TESTS, folders, strict=True):
        if (folder / DONE).exists():
            continue
        run_test(test, folder)
        (folder / DONE).touch()
    return report_of(folders, CACHE)


def run_test(test: str, folder: Path, source: Path = PACKAGE) -> None:
    """Run a test file, and store its coverage of a source folder, also on ranks, in a new folder.

    Raises:
        SystemExit: A test failed, or the end of its ranks.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    what = ["-m", "pytest", "-q", "-p", "scripts.npu_coverage", "-p", "no:cacheprovider", test]
    if _coverage(folder, source, "run", *what) != 0:
        sys.exit(f"{test} or the end of its ranks failed; both must pass first")


def report_of(folders: Sequence[Path], into: Path, source: Path = PACKAGE) -> dict[str, Any]:
    """Return the report of coverage that was stored in several folders."""
    report = into / "report.json"
    _coverage(into, source, "combine", "-q", "--keep", *map(str, folders))
    _coverage(into, source, "json", "-q", "-o", str(report))
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def _coverage(folder: Path, source: Path, *words: str) -> int:
    """Run a command of coverage on the data in a folder."""
    settings = folder / "settings"
    settings.write_text(
        # Ranks are forks of processes that are measured, and inherit the tracer.
        "[run]\nbranch = true\nparallel = true\npatch = subprocess\n"
        f"data_file = {folder / 'data'}\nsource = {source}\nomit = */proof/*\n",
        encoding="utf-8",
    )
    (command, *rest) = words
    call = [sys.executable, "-m", "coverage", command, f"--rcfile={settings}", *rest]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(call, cwd=ROOT, env=environment).returncode


def pytest_configure() -> None:
    """Let ranks exit by themselves, which they do when their pipe is closed."""
    from ascend_run.testing.pool import GlooPool

    at_once = GlooPool.close

    def close(self: GlooPool) -> None:
        for worker in self._workers:
            worker.connection.close()
        for rank, worker in enumerate(self._workers):
            if code := worker.process.exit_code(EXIT_SECONDS):
                print(f"rank {rank} has not written its coverage: exit {code}", file=sys.stderr)
        at_once(self)

    # Patched in this process only: a rank that is killed does not write its coverage.
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
