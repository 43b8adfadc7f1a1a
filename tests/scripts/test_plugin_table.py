from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOL = ROOT / "scripts/plugin_table.py"


def run_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_table_is_added_if_missing_and_otherwise_updated(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# ascend-run\n")

    assert run_tool("--check", readme).returncode == 1
    assert run_tool(readme).returncode == 0
    first = readme.read_text()
    assert run_tool("--check", readme).returncode == 0
    assert run_tool(readme).returncode == 0

    assert first.startswith("# ascend-run\n\n## Plugins\n\n<!-- plugins:begin -->\n| plugin |")
    assert "docs/plugins/platforms/cpu.md" in first
    assert readme.read_text() == first


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- plugins:begin -->\nold\n<!-- plugins:end -->\nafter\n")

    assert run_tool(readme).returncode == 0

    text = readme.read_text()
    assert text.startswith("before\n<!-- plugins:begin -->\n")
    assert text.endswith("<!-- plugins:end -->\nafter\n")
    assert "\nold\n" not in text


@pytest.mark.parametrize(
    "text",
    [
        "<!-- plugins:begin -->\n",
        "<!-- plugins:end -->\n",
        "<!-- plugins:end -->\n<!-- plugins:begin -->\n",
    ],
)
def test_half_a_pair_of_markers_is_refused(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)

    assert run_tool(readme).returncode != 0
    assert readme.read_text() == text


def test_the_readme_has_the_plugins_that_there_are() -> None:
    process = run_tool("--check")

    assert process.returncode == 0, process.stderr
