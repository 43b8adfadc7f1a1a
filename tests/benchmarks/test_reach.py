"""The hash of what a trial can reach, in a made-up tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.campaigns.reach import Sources

WIDE, NARROW = "ascend_run/plugins/operators/wide", "ascend_run/plugins/operators/narrow"
FILES = {
    "setup.cfg": "[options.entry_points]\nascend_run.plugins =\n"
    "    wide = ascend_run.plugins.operators.wide:Wide\n"
    "    narrow = ascend_run.plugins.operators.narrow:Narrow\n",
    "ascend_run/__init__.py": "",
    "ascend_run/testing/kit.py": "def run():\n    from ascend_run.core.loop import TARGET\n",
    "ascend_run/testing/parity.py": "",
    "ascend_run/testing/pool.py": "",
    "ascend_run/testing/worker.py": "",
    "ascend_run/core/__init__.py": "",
    "ascend_run/core/loop.py": "TARGET = 'ascend_run.core.named:main'\n",
    "ascend_run/core/named.py": "VALUE = 1\n",
    "ascend_run/ops/products.py": '"""Products."""\n\n\ndef product():\n    "One."\n    return 1\n',
    "ascend_run/ops/unused.py": "",
    f"{WIDE}/__init__.py": "def hook():\n    from .work import compute\n",
    f"{WIDE}/work.py": "from ascend_run.ops import products\n",
    f"{WIDE}/table.json": "{}",
    f"{NARROW}/__init__.py": "",
}
SETS = {"plain": (), "narrow": ("narrow",), "wide": ("wide",), "both": ("wide", "narrow")}


def hashes(root: Path) -> dict[str, str]:
    sources = Sources.read(root)
    return {name: sources.hash(plugins) for name, plugins in SETS.items()}


def write(root: Path, file: str, text: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)


@pytest.mark.parametrize(
    ("file", "text", "touched"),
    [
        (f"{NARROW}/__init__.py", "VALUE = 1\n", {"narrow", "both"}),
        (f"{WIDE}/work.py", "", {"wide", "both"}),
        (f"{WIDE}/table.json", "[]", {"wide", "both"}),
        (f"{WIDE}/more.py", "", {"wide", "both"}),
        ("ascend_run/ops/products.py", "def product():\n    return 2\n", {"wide", "both"}),
        ("ascend_run/ops/products.py", "# New.\ndef product():\n    return 1\n", set()),
        ("ascend_run/ops/unused.py", "VALUE = 1\n", set()),
        ("ascend_run/core/loop.py", "", {*SETS}),
        ("ascend_run/core/named.py", "VALUE = 2\n", {*SETS}),
        ("ascend_run/core/__init__.py", "VALUE = 1\n", {*SETS}),
        ("ascend_run/testing/worker.py", "VALUE = 1\n", {*SETS}),
    ],
)
def test_a_change_touches_the_trials_that_can_reach_it(
    tmp_path: Path, file: str, text: str, touched: set[str]
) -> None:
    for name, content in FILES.items():
        write(tmp_path, name, content)
    before = hashes(tmp_path)
    assert len({*before.values()}) == len(SETS)
    write(tmp_path, file, text)
    after = hashes(tmp_path)
    assert {name for name in SETS if before[name] != after[name]} == touched


def test_what_else_a_trial_depends_on_is_hashed(tmp_path: Path) -> None:
    for name, content in FILES.items():
        write(tmp_path, name, content)
    sources = Sources.read(tmp_path)
    assert sources.hash(["wide"], "a=1") == sources.hash(["wide"], "a=1")
    assert sources.hash(["wide"], "a=1") != sources.hash(["wide"], "a=2")
