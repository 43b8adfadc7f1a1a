"""Which tests a change reaches, in a made-up tree and in this one."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from scripts.changed_tests import ABOUT_SOURCES, ROOT, Tree, reached_tests

FILES = {
    "setup.cfg": "[options.entry_points]\nascend_run.plugins =\n"
    "    wide = ascend_run.plugins.operators.wide:Wide\n"
    "    family = ascend_run.plugins.models.family:Family\n"
    "ascend_run.manifests =\n"
    "    wide = ascend_run.plugins.operators.wide:manifest.toml\n"
    "    family = ascend_run.plugins.models:family.toml\n",
    "ascend_run/core/__init__.py": "",
    "ascend_run/core/low.py": "",
    "ascend_run/core/high.py": "def later():\n    from .low import thing\n",
    "ascend_run/ops/product.py": "",
    "ascend_run/ops/table.py": "PRODUCT = 'ascend_run.ops.product:product'\n",
    "ascend_run/plugins/operators/__init__.py": "",
    "ascend_run/plugins/operators/wide/__init__.py": "from .work import compute\n",
    "ascend_run/plugins/operators/wide/work.py": "from ascend_run.ops import table\n",
    "ascend_run/plugins/operators/wide/table.json": "{}",
    "ascend_run/plugins/models/family.py": "",
    "ascend_run/plugins/models/other.py": "",
    "ascend_run/tools/preset/__init__.py": "",
    "ascend_run/tools/preset/records/family.toml": "",
    "scripts/words.py": "",
    "scripts/other.py": "",
    "scripts/words.toml": "",
    "tests/scripts/test_words.py": "from scripts import words\n",
    "tests/scripts/test_other.py": "from scripts import other\n",
    "tests/core/test_high.py": "from ascend_run.core import high\n",
    "tests/core/test_started.py": "TARGET = 'ascend_run.core.low:main'\n",
    "tests/core/test_other.py": "",
    "tests/contract/test_plugins.py": "",
    "tests/contract/test_docs.py": "",
    "tests/contract/test_high.py": "from ascend_run.core import high\n",
    "tests/contract/test_imports.py": "",
    "tests/entrypoints/test_named.py": "run('--enable', 'gmm,wide')\n",
    "tests/plugins/operators/test_all.py": "",
    "tests/plugins/operators/wide/test_wide.py": "",
    "tests/plugins/operators/narrow/test_narrow.py": "ENABLE = 'wide'\n",
    "tests/plugins/models/test_families.py": "",
    "tests/registry/test_discovery.py": "",
    "tests/tools/preset/test_preset.py": "import ascend_run.tools.preset\n",
}
HIGH, STARTED = "tests/core/test_high.py", "tests/core/test_started.py"
CONTRACT, IMPORTS = "tests/contract/test_high.py", "tests/contract/test_imports.py"
WIDE, NAMED = "tests/plugins/operators/wide/test_wide.py", "tests/entrypoints/test_named.py"
GROUP, FAMILIES = "tests/plugins/operators/test_all.py", "tests/plugins/models/test_families.py"
PRESET = "tests/tools/preset/test_preset.py"
PLUGIN = "ascend_run/plugins/operators/wide"


@pytest.mark.parametrize(
    ("changed", "files", "plugins"),
    [
        (["ascend_run/core/low.py"], [CONTRACT, IMPORTS, HIGH, STARTED], []),
        (["ascend_run/core/high.py"], [CONTRACT, IMPORTS, HIGH], []),
        (["ascend_run/core/__init__.py"], [CONTRACT, IMPORTS, HIGH, STARTED], []),
        (["ascend_run/ops/product.py"], [IMPORTS, GROUP, WIDE], ["wide"]),
        (["ascend_run/plugins/operators/__init__.py"], [IMPORTS, NAMED, GROUP, WIDE], ["wide"]),
        (["ascend_run/plugins/models/family.py"], [IMPORTS, FAMILIES], ["family"]),
        (["ascend_run/plugins/models/other.py"], [IMPORTS], []),
        (["ascend_run/tools/preset/records/family.toml"], [PRESET], []),
        (["scripts/words.toml"], ["tests/scripts/test_words.py"], []),
        (
            ["setup.cfg"],
            [IMPORTS, "tests/contract/test_plugins.py", "tests/registry/test_discovery.py"],
            [],
        ),
        (["tests/core/test_other.py"], ["tests/core/test_other.py"], []),
        ([f"{PLUGIN}/work.py"], [IMPORTS, NAMED, GROUP, WIDE], ["wide"]),
        (
            [f"{PLUGIN}/work.py", "ascend_run/core/high.py"],
            [CONTRACT, IMPORTS, HIGH, NAMED, GROUP, WIDE],
            ["wide"],
        ),
        ([f"{PLUGIN}/table.json"], [NAMED, GROUP, WIDE], ["wide"]),
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


@functools.cache
def this_tree() -> Tree:
    return Tree.read(ROOT)


SEQUENCE = [f"plugins/sequence/test_{name}" for name in ("effects", "kernel", "rules", "runs")]


@pytest.mark.parametrize(
    ("changed", "suites"),
    [
        ("ascend_run/ops/attention/context_parallel/plan.py", SEQUENCE),
        ("ascend_run/plugins/sequence/__init__.py", SEQUENCE),
        pytest.param(
            "ascend_run/plugins/sequence/ulysses/__init__.py",
            SEQUENCE,
            marks=pytest.mark.needs_plugins("ulysses"),
        ),
        ("ascend_run/ops/elementwise/rms_norm.py", ["plugins/operators/rms_norm/test_rms_norm"]),
        ("ascend_run/plugins/models/llama.py", ["plugins/models/test_families"]),
        ("ascend_run/plugins/models/__init__.py", ["plugins/models/test_families"]),
        ("setup.cfg", ["registry/test_discovery", "contract/test_plugins"]),
        (
            "ascend_run/tools/pages/assets/page.js",
            ["tools/report/test_in_browser"],
        ),
        ("ascend_run/tools/plan/cost_model/cpu.json", ["tools/plan/cost_model/test_step_time"]),
        ("ascend_run/tools/preset/records/llama.toml", ["tools/preset/test_records"]),
        ("ascend_run/tools/new_plugin/templates/test.py.jinja", ["tools/new_plugin/test_command"]),
        ("scripts/field_words.toml", ["contract/test_field_words", "scripts/test_field_words"]),
    ],
)
def test_a_change_of_this_tree_selects_its_suites(changed: str, suites: list[str]) -> None:
    files, _ = reached_tests(this_tree(), [changed])
    assert {f"tests/{suite}.py" for suite in suites} <= {*files}


def test_a_change_of_the_package_selects_the_tests_of_all_sources() -> None:
    files, _ = reached_tests(this_tree(), ["ascend_run/core/run.py"])
    assert ABOUT_SOURCES - {*files} == set()


def test_a_change_of_one_plugin_selects_few_files() -> None:
    files, plugins = reached_tests(this_tree(), ["ascend_run/plugins/operators/alibi/__init__.py"])
    num_tests = sum("/test_" in file for file in this_tree().modules)
    assert plugins == ["alibi"]
    assert len(files) < num_tests / 10
