"""The drawing of the layers, of a made-up package."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from scripts.package_layers import BEGIN, END, PAGE, PICTURE, arrows, command

FILES = {
    "types/config.py": "WIDTH = 1\n",
    "plugin_api/__init__.py": "from ascend_run.types.config import WIDTH\n",
    "core/run.py": "from ascend_run.plugin_api import WIDTH\nfrom ..types import config\n",
    "plugins/gmm/__init__.py": "def hook():\n    from ascend_run.plugin_api import WIDTH\n",
}
"""Path in the package -> source."""
ALLOWED = {"plugin_api": {"types"}, "core": {"plugin_api", "types"}, "plugins": {"plugin_api"}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, source in FILES.items():
        write(tmp_path, name, source)
    (tmp_path / PICTURE).parent.mkdir(parents=True)
    (tmp_path / PAGE).write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    assert run(tmp_path) == (0, "")
    return tmp_path


def write(root: Path, name: str, source: str) -> None:
    file = root / "ascend_run" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)


def run(root: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, ["--root", str(root), *options])
    return result.exit_code, result.output


def drawn(root: Path) -> dict[str, set[str]]:
    """The layers with imports on the page; in the picture stand as many arrows."""
    found = {layer: below for layer, below in arrows((root / PAGE).read_text()).items() if below}
    assert (root / PICTURE).read_text().count("<path ") == sum(map(len, found.values()))
    return found


def test_the_page_has_the_imports_and_lines_of_each_layer(root: Path) -> None:
    page = (root / PAGE).read_text()
    assert page.startswith(f"before\n{BEGIN}\n")
    assert page.endswith(f"\n{END}\nafter\n")
    assert "| `core` | 2 | " in page
    assert drawn(root) == ALLOWED
    assert run(root, "--check") == (0, "")


@pytest.mark.parametrize(
    ("file", "source", "edge"),
    [
        ("plugins/gmm/work.py", "def work():\n    import ascend_run.core.run\n", "plugins core"),
        ("core/kit.py", "from ascend_run.plugins.gmm import hook\n", "core plugins"),
        ("types/device.py", "from ..core import run\n", "types core"),
    ],
    ids=["in a function", "of a name", "relative"],
)
def test_a_forbidden_import_fails_the_check_and_is_drawn(
    root: Path, file: str, source: str, edge: str
) -> None:
    write(root, file, source)
    code, output = run(root, "--check")
    assert (code, output) == (1, f"{PAGE} is old; run python -m scripts.package_layers\n")
    assert drawn(root) == ALLOWED  # --check writes nothing
    assert run(root) == (0, "")
    above, below = edge.split()
    assert drawn(root) == ALLOWED | {above: ALLOWED.get(above, set()) | {below}}


def test_a_page_with_an_arrow_of_no_import_fails_the_check(root: Path) -> None:
    write(root, "core/run.py", "from ascend_run.plugin_api import WIDTH\n")
    assert run(root, "--check")[0] == 1


def test_other_numbers_of_lines_leave_the_page_valid(root: Path) -> None:
    write(root, "types/config.py", "WIDTH = 1\nHEIGHT = 2\n")
    assert run(root, "--check") == (0, "")


def test_a_package_on_no_level_is_refused(root: Path) -> None:
    write(root, "extras/more.py", "MORE = 1\n")
    code, output = run(root, "--check")
    assert (code, "extras: on no level of package_layers.py" in output) == (1, True)
