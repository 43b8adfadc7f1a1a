"""Without some built-in features, their lines, their tests and their pages: what is left passes.

Each case is a copy of the tracked tree, in an environment of its own, that never had four of the
features; the tables are written again. It runs the test files that could notice: those of the
contracts, the commands, the registry, the kit and the benchmarks, and all that name one of the
features or ask which plugins there are.

Of any two features there is a case without the first that has the second, so a test that needs the
first fails in one of them, even where it is left out without the second.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
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
SETS: Final = 5
"""As many pairs of them as there are features."""
WORDS: Final = (
    "-q",
    "-rfE",
    "-n",
    "2",
    "--dist",
    "loadfile",
    "-p",
    "no:cacheprovider",
    "--durations=30",
    # Who deletes the only plugin of a hook deletes the hook too, or names who comes next.
    "--deselect",
    "tests/scripts/test_hook_table.py::test_every_hook_has_a_plugin_or_names_the_first_to_come",
    # The result of this very campaign.
    "--deselect",
    "tests/benchmarks/test_removal.py::test_the_whole_campaign_was_run_and_what_was_left_passed",
)
TABLES: Final = ("plugin_table", "compatibility", "platform_table", "hook_table")
"""Tools that write what names every plugin."""
ALWAYS: Final = ("contract", "entrypoints", "registry", "plugin_api", "benchmarks")
"""Folders of tests that run whole."""
ASKS: Final = r"\bdiscover\(|\bexamples/"
"""In code that asks which plugins there are, or runs an example, which may enable any."""


def cases(seed: int) -> Sequence[str]:
    """Five sets, each feature in two of them; nothing is drawn."""
    chosen = [*zip(FEATURES, combinations(range(SETS), 2), strict=True)]
    return ["+".join(name for name, sets in chosen if k in sets) for k in range(SETS)]


def run(case: str) -> Outcome:
    """Remove the features of a set, and run what could notice."""
    features = case.split("+")
    with copy_without(features) as tree:
        files = sorted({path for feature in features for path in noticing(tree, feature)})
        found = outcome(tree, files, LOGS / f"{case}.log")
        return {**found, "tree": (tree / "commit").read_text().strip()}


@contextmanager
def copy_without(features: Sequence[str]) -> Iterator[Path]:
    """A copy of the last commit and an environment for it, both gone afterwards."""
    COPIES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="without-", dir=COPIES) as folder:
        tree = Path(folder)
        archive = tree / "tree.tar"
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
        (tree / "commit").write_text(head)  # of what was copied, should HEAD move on
        subprocess.run(["git", "archive", "--output", archive, head], cwd=ROOT, check=True)
        shutil.unpack_archive(archive, tree, filter="data")
        archive.unlink()
        for feature in features:
            remove(tree, feature)
        make_environment(tree)
        for tool in TABLES:
            command = [python_of(tree), f"scripts/{tool}.py"]
            subprocess.run(command, cwd=tree, env=environment(tree), check=True)
        yield tree


def remove(tree: Path, feature: str) -> None:
    """Delete what is a feature's own; a link to its page becomes the words that it was made of, and
    a setting of it is no code any more."""
    setup = tree / "setup.cfg"
    lines = setup.read_text(encoding="utf-8").splitlines(keepends=True)
    line = re.compile(rf"\s*{feature} = ascend_run\.plugins\.(\w+)\.(\w+):")
    found = next(filter(None, map(line.match, lines)), None)
    assert found is not None, f"setup.cfg has no line of {feature}"
    category, module = found.groups()
    for part in ("ascend_run", "tests"):
        shutil.rmtree(tree / part / "plugins" / category / module)
    (tree / f"docs/plugins/{category}/{feature}.md").unlink()
    link = re.compile(rf"\[([^\]]*)\]\((?:[\w./]*/)?{feature}\.md(?:#[^)]*)?\)")
    setting = re.compile(rf"`(plugins\.{feature}\.[^`]*)`")
    for page in (tree / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        left = setting.sub(r"\1", link.sub(r"\1", text))
        if left != text:
            page.write_text(left, encoding="utf-8")
    owner = f" = ascend_run.plugins.{category}.{module}:"
    kept = [line for line in lines if owner not in line]
    setup.write_text("".join(kept), encoding="utf-8")


def make_environment(tree: Path) -> None:
    """This environment in hard links, with the copy instead of this tree."""
    subprocess.run(["cp", "-al", sys.prefix, tree / ".venv"], check=True)
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    command = [python_of(tree), *install, "--editable", "."]
    # Its warnings are about any editable install.
    subprocess.run(command, cwd=tree, env=environment(tree), check=True, stderr=subprocess.DEVNULL)


def python_of(tree: Path) -> str:
    """The interpreter of a copy's environment."""
    return str(tree / ".venv/bin/python")


def environment(tree: Path) -> dict[str, str]:
    """In which nothing of this tree is found, only the copy."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    path = f"{tree / '.venv/bin'}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def noticing(tree: Path, feature: str) -> list[str]:
    """Files of tests that its removal could break."""
    word = feature.replace("-", "[-_]")
    # Names that are words of Python or Megatron too are looked for as names of a plugin.
    names = rf"[\"'+,/.]{word}\b" if feature in ("compile", "deterministic") else rf"\b{word}\b"
    asks = re.compile(f"{ASKS}|{names}")
    texts = {path: path.read_text(encoding="utf-8") for path in tree.glob("tests/**/*.py")}
    chosen = {path for path, text in texts.items() if asks.search(text)}
    helpers = [p for p in chosen if not p.name.startswith("test_") and p.stem != "needed_plugins"]
    for helper in helpers:  # a case that needs a feature names it itself
        chosen |= {path for path, text in texts.items() if _imports(path, text, helper, tree)}
    for folder in ALWAYS:
        chosen |= {*(tree / "tests" / folder).rglob("*.py")}
    tests = (path for path in chosen if path.name.startswith("test_"))
    return sorted(str(path.relative_to(tree)) for path in tests)


def _imports(path: Path, text: str, helper: Path, tree: Path) -> bool:
    """Whether a file imports a helper, from beside it or by its whole name."""
    package = ".".join(helper.parent.relative_to(tree).parts).replace(".", r"\.")
    roots = package if path.parent != helper.parent else rf"(?:{package}|)"
    name = helper.stem
    imports = rf"^\s*(?:from {roots}\.?{name} import|from {roots}\.? ?import .*\b{name}\b)"
    return re.search(imports, text, re.MULTILINE) is not None


def outcome(tree: Path, files: Sequence[str], log: Path) -> Outcome:
    """What pytest says. What fails is tried once more: a busy machine is no removed plugin."""
    counts, failing = pytest(tree, files, log)
    again: list[str] = []
    if failing:
        _, again = pytest(tree, failing, log.with_suffix(".again.log"))
    figures: dict[str, Any] = {"files": len(files), **counts}
    if failing:
        figures["only_at_first"] = sorted({*failing} - {*again})
    if counts.get("passed", 0) > 0 and not again:
        return {"verdict": PASSED, **figures}
    return {"verdict": "fails", **figures, "failing": again}


def pytest(tree: Path, tests: Sequence[str], log: Path) -> tuple[dict[str, int], list[str]]:
    """Counts of what passed, failed and was deselected, and the tests that failed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        subprocess.run(
            [python_of(tree), "-m", "pytest", *WORDS, *tests],
            cwd=tree,
            env=environment(tree),
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
            # Started in the background it is ignored, and tests of Ctrl-C need it.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    return summary(log.read_text(encoding="utf-8", errors="replace"))


def summary(text: str) -> tuple[dict[str, int], list[str]]:
    """The last line's counts, and the tests named as failed or in error."""
    last = text.rstrip().rpartition("\n")[2]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", last)}
    known = ("passed", "failed", "errors", "error", "skipped", "deselected")
    named = r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::\w+(?:\[.*?\])?)?)(?: - .*)?$"
    failing = re.findall(named, text, re.MULTILINE)
    return {word: counts[word] for word in known if word in counts}, [*dict.fromkeys(failing)]


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    """What passed without each set."""
    return {
        "without": {
            case: {key: value for key, value in found.items() if key != "failing"}
            for case, found in outcomes.items()
        },
        "features": len(FEATURES),
    }


CAMPAIGN = Campaign(name="removal", seed=0, cases=cases, run=run, figures=figures)
