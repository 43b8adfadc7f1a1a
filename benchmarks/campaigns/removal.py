"""Without a feature of ours, its line, its tests and its page: what is left passes.

Each case is a copy of the tracked tree, in an environment of its own, that never had the feature;
the tables are written anew. It runs the test files that could notice: those of the contracts, the
commands, the registry and the kit, and all that name a feature or ask which plugins there are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from .campaign import FOLDER, PASSED, Campaign, Outcome

ROOT: Final = FOLDER.parents[1]
COPIES: Final = ROOT / "build"
"""Beside the environment, as hard links do not cross file systems."""
LOGS: Final = ROOT / "build/campaigns/removal"
SECONDS: Final = 3600
"""For one case."""
FEATURES: Final = (
    "compile",
    "deterministic",
    "gloo-offload",
    "gmm",
    "lora",
    "noop-layers",
    "ring-attention",
    "swap-attention",
    "tensorboard",
    "ulysses",
)
ALWAYS: Final = ("contract", "entrypoints", "registry", "plugin_api")
"""Folders of tests that run whole."""
ASKS: Final = re.compile(
    r"discover\(|EXCHANGE\b|\b("
    + "|".join(name.replace("-", "[-_]") for name in FEATURES if name != "compile")
    + r")\b|[\"']compile\b|plugins[./]compile\b"
)
"""In code that names a feature, or asks which there are."""


def cases(seed: int) -> Sequence[str]:
    """A feature each; nothing is drawn."""
    return FEATURES


def run(case: str) -> Outcome:
    """Remove one feature, and run what could notice."""
    with copy_without([case]) as tree:
        return outcome(tree, noticing(tree), LOGS / f"{case}.log")


@contextmanager
def copy_without(features: Sequence[str]) -> Iterator[Path]:
    """A copy of the last commit and an environment for it, both gone afterwards."""
    COPIES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="without-", dir=COPIES) as folder:
        tree = Path(folder)
        archive = tree / "tree.tar"
        subprocess.run(["git", "archive", "--output", archive, "HEAD"], cwd=ROOT, check=True)
        shutil.unpack_archive(archive, tree, filter="data")
        archive.unlink()
        for feature in features:
            remove(tree, feature)
        make_environment(tree)
        for tool in ("plugin_table", "compatibility"):
            command = [python_of(tree), f"tools/{tool}.py"]
            subprocess.run(command, cwd=tree, env=environment(tree), check=True)
        yield tree


def remove(tree: Path, feature: str) -> None:
    """Delete what is a feature's own."""
    module = feature.replace("-", "_")
    for part in ("ascend_run", "tests"):
        shutil.rmtree(tree / part / "plugins" / module)
    (tree / f"docs/plugins/{feature}.md").unlink()
    setup = tree / "setup.cfg"
    lines = setup.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if f" = ascend_run.plugins.{module}:" not in line]
    assert len(kept) < len(lines), f"setup.cfg has no line of {feature}"
    setup.write_text("".join(kept), encoding="utf-8")


def make_environment(tree: Path) -> None:
    """This environment in hard links, with the copy in the place of this tree."""
    subprocess.run(["cp", "-al", sys.prefix, tree / ".venv"], check=True)
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    command = [python_of(tree), *install, "--editable", "."]
    subprocess.run(command, cwd=tree, env=environment(tree), check=True)


def python_of(tree: Path) -> str:
    """The interpreter of a copy's environment."""
    return str(tree / ".venv/bin/python")


def environment(tree: Path) -> dict[str, str]:
    """In which nothing of this tree is found, only the copy."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    path = f"{tree / '.venv/bin'}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def noticing(tree: Path) -> list[str]:
    """Files of tests that a removal could break; with a helper that asks, all tests beside it."""
    asking = [path for path in tree.glob("tests/**/*.py") if ASKS.search(path.read_text())]
    chosen = set()
    for path in asking:
        if path.name.startswith("test_"):
            chosen.add(path)
        elif path.parent != tree / "tests/support":
            chosen |= {*path.parent.glob("test_*.py")}
    for folder in ALWAYS:
        chosen |= {*(tree / "tests" / folder).rglob("test_*.py")}
    return sorted(str(path.relative_to(tree)) for path in chosen)


def outcome(tree: Path, files: Sequence[str], log: Path) -> Outcome:
    """What pytest says. What fails is tried once more: a busy machine is no removed plugin."""
    counts, failing = pytest(tree, files, log)
    again: list[str] = []
    if failing:
        _, again = pytest(tree, failing, log.with_suffix(".again.log"))
    figures: dict[str, Any] = {"files": len(files), **counts}
    if failing:
        figures["only_at_first"] = sorted({*failing} - {*again})
    passed = counts.get("passed", 0) > 0 and not again
    return {"verdict": PASSED, **figures} if passed else {**figures, **_told(again)}


def _told(again: Sequence[str]) -> Mapping[str, Any]:
    return {"verdict": "fails", "failing": [*again]}


def pytest(tree: Path, tests: Sequence[str], log: Path) -> tuple[dict[str, int], list[str]]:
    """Counts of what passed, failed and was deselected, and the tests that failed."""
    words = [
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-p",
        "no:cacheprovider",
    ]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        subprocess.run(
            [python_of(tree), *words, *tests],
            cwd=tree,
            env=environment(tree),
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        )
    return summary(log.read_text(encoding="utf-8", errors="replace"))


def summary(text: str) -> tuple[dict[str, int], list[str]]:
    """The last line's counts, and the tests named as failed or in error."""
    last = text.rstrip().rpartition("\n")[2]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", last)}
    known = ("passed", "failed", "errors", "error", "skipped", "deselected")
    failing = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - .*)?$", text, re.M)
    return {word: counts[word] for word in known if word in counts}, [*dict.fromkeys(failing)]


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    """What passed without each."""
    return {
        "without": {
            case: {key: value for key, value in found.items() if key != "failing"}
            for case, found in outcomes.items()
        },
        "features": len(outcomes),
    }


CAMPAIGN = Campaign(name="removal", seed=0, cases=cases, run=run, figures=figures)
