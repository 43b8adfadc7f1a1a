"""Which tests a change reaches, in a made-up tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.changed_tests import Tree, reached_tests

FILES = {
    "setup.cfg": "[options.entry_points]\nascend_run.plugins =\n"
    "    wide = ascend_run.plugins.operators.wide:Wide\n",
    "ascend_run/core/__init__.py": "",
    "ascend_run/core/low.py": "",
    "ascend_run/core/high.py": "def later():\n    from .low import thing\n",
    "ascend_run/plugins/operators/wide/__init__.py": "from .work import compute\n",
    "ascend_run/plugins/operators/wide/work.py": "",
    "ascend_run/plugins/operators/wide/table.json": "{}",
    "tests/core/test_high.py": "from ascend_run.core import high\n",
    "tests/core/test_started.py": "TARGET = 'ascend_run.core.low:main'\n",
    "tests/core/test_other.py": "",
    "tests/contract/test_plugins.py": "",
    "tests/contract/test_docs.py": "",
    "tests/contract/test_high.py": "from ascend_run.core import high\n",
    "tests/contract/test_imports.py": "",
    "tests/entrypoints/test_named.py": "run('--enable', 'gmm,wide')\n",
    "tests/plugins/operators/wide/test_wide.py": "",
    "tests/plugins/operators/narrow/test_narrow.py": "ENABLE = 'wide'\n",
}
HIGH, STARTED = "tests/core/test_high.py", "tests/core/test_started.py"
CONTRACT, IMPORTS = "tests/contract/test_high.py", "tests/contract/test_imports.py"
WIDE, NAMED = "tests/plugins/operators/wide/test_wide.py", "tests/entrypoints/test_named.py"
PLUGIN = "ascend_run/plugins/operators/wide"


@pytest.mark.parametrize(
    ("changed", "files", "plugins"),
    [
        (["ascend_run/core/low.py"], [CONTRACT, HIGH, STARTED], []),
        (["ascend_run/core/high.py"], [CONTRACT, HIGH], []),
        (["tests/core/test_other.py"], ["tests/core/test_other.py"], []),
        ([f"{PLUGIN}/work.py"], [IMPORTS, NAMED, WIDE], ["wide"]),
        (
            [f"{PLUGIN}/work.py", "ascend_run/core/high.py"],
            [CONTRACT, IMPORTS, HIGH, NAMED, WIDE],
            ["wide"],
        ),
        ([f"{PLUGIN}/table.json"], [IMPORTS, NAMED, WIDE], ["wide"]),
        (["docs/plan.md"], ["tests/contract/test_docs.py"], []),
        (["pyproject.toml"], ["tests"], []),
        ([], [], []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_change_reaches_what_uses_it(
    tmp_path: Path, changed: list[str], files: list[str], plugins: list[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert reached_tests(Tree.read(tmp_path), changed) == (files, plugins)
