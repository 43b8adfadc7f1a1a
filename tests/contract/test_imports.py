"""Imports point one way; the contracts stand in pyproject.toml."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import top

ROOT = Path(__file__).parent.parent.parent

_TORCH_FREE = (
    "ascend_run.plugin_api",
    "ascend_run.prepare.plan.explanation",
    "ascend_run.registry.lock",
    "ascend_run.registry.loading",
    "ascend_run.prepare.prepare",
    "ascend_run.entrypoints.cli",
)

_OTHERS_MODULES = {"ascend_run/text/sources/tables.py": "of pyarrow"}
"""Files that may compose the name of a module that they import, and whose modules these are."""

_IMPORTERS = ("__import__", "files", "find_spec", "import_module")

_IMPORT = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*sys.modules)
"""


def lint_imports(config: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's own answer; without its cache, which another run may be writing."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=config.parent,
    )


def test_every_contract_is_kept() -> None:
    process = lint_imports(ROOT / "pyproject.toml")

    assert process.returncode == 0, process.stdout + process.stderr
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert f"Contracts: {len(contracts['contracts'])} kept, 0 broken." in process.stdout


_FLOORS = (
    *("types", "plugin_api", "families", "ops", "text", "registry", "core", "prepare", "launch"),
    *("testing", "testing/oracle", "tools", "entrypoints", "reference", "plugins"),
    *("plugins/platforms", "plugins/platforms/cpu", "plugins/experts", "plugins/experts/gmm"),
    *("plugins/tasks", "plugins/tasks/dpo", "plugins/tasks/shared"),
)
_MAY_IMPORT = {
    "types": "",
    "reference": "",
    "ops": "types",
    "plugin_api": "types",
    "families": "types plugin_api",
    "text": "types plugin_api",
    "registry": "types plugin_api",
    "plugins": "types plugin_api families ops text",
    "core": "types plugin_api ops text",
    "launch": "types plugin_api core",
    "prepare": "types plugin_api core registry text",
    "testing": "types plugin_api core registry text ops prepare launch",
    "tools": "types plugin_api core registry text ops prepare launch testing",
    "entrypoints": "types plugin_api core registry text prepare launch testing tools",
}
"""Layer of the package -> the others that it may import."""
_ONE_WAY, _OWN = "imports point one way", "plugin_api, families, ops, text and types only"
_NO_TORCH = "text imports plugin_api and types only"
_ORACLE = "the oracle imports torch, attrs and types only"
_PLANTED = [
    ("plugins/experts/gmm/__init__.py", "import ascend_run.core", _OWN),
    ("plugins/experts/gmm/deep.py", "import ascend_run.registry.kinds", _OWN),
    ("plugins/experts/gmm/deep.py", "import ascend_run.testing", _OWN),
    ("plugins/experts/gmm/deep.py", "import ascend_run.tools", _OWN),
    ("plugins/experts/gmm/__init__.py", "import ascend_run.plugins.platforms.cpu", "never imports"),
    ("plugins/experts/gmm/__init__.py", "import ascend_run.plugins.platforms", "shares nothing"),
    ("plugins/tasks/shared/__init__.py", "import ascend_run.plugins.tasks.dpo", "never imports"),
    ("core/__init__.py", "import ascend_run.registry", _ONE_WAY),
    ("core/__init__.py", "import ascend_run.tools", _ONE_WAY),
    ("core/__init__.py", "import ascend_run.testing", _ONE_WAY),
    ("core/__init__.py", "import ascend_run.prepare", _ONE_WAY),
    ("core/__init__.py", "import ascend_run.entrypoints", _ONE_WAY),
    ("registry/__init__.py", "import ascend_run.core", _ONE_WAY),
    ("prepare/__init__.py", "import ascend_run.tools", _ONE_WAY),
    ("testing/__init__.py", "import ascend_run.tools", _ONE_WAY),
    ("tools/__init__.py", "import ascend_run.entrypoints", _ONE_WAY),
    ("plugin_api/__init__.py", "import ascend_run.core", _ONE_WAY),
    ("types/__init__.py", "import ascend_run.plugin_api", _ONE_WAY),
    ("registry/__init__.py", "import ascend_run.plugins.platforms.cpu", "nothing imports a plugin"),
    ("core/__init__.py", "import ascend_run.plugins.platforms.cpu", "nothing imports a plugin"),
    ("plugin_api/__init__.py", "import ascend_run.ops", "plugin_api and types import no ops"),
    ("families/__init__.py", "import ascend_run.ops", "plugin_api and types import no ops"),
    ("families/__init__.py", "import ascend_run.core", _ONE_WAY),
    ("core/__init__.py", "import ascend_run.families", _ONE_WAY),
    ("tools/__init__.py", "import ascend_run.families", "only plugins import families"),
    ("ops/__init__.py", "import ascend_run.plugin_api", "ops import types and torch only"),
    ("ops/__init__.py", "import megatron.core", "ops import types and torch only"),
    ("ops/__init__.py", "import ascend_run.text", "ops import types and torch only"),
    ("text/__init__.py", "import ascend_run.core", _ONE_WAY),
    ("text/__init__.py", "import ascend_run.plugins.platforms.cpu", "nothing imports a plugin"),
    ("text/__init__.py", "import ascend_run.ops", _NO_TORCH),
    ("text/__init__.py", "import torch", _NO_TORCH),
    ("testing/oracle/__init__.py", "import ascend_run.core", _ORACLE),
    ("testing/oracle/deep.py", "import ascend_run.ops", _ORACLE),
    ("types/__init__.py", "import ascend_run.reference", "nothing imports the reference"),
    ("reference/__init__.py", "import ascend_run.types", "the reference imports nothing"),
    ("launch/__init__.py", "import ascend_run.registry", "launch imports core, plugin_api"),
    ("registry/__init__.py", "import ascend_run.text", "registry and families import"),
    ("families/__init__.py", "import ascend_run.text", "registry and families import"),
    ("prepare/__init__.py", "import ascend_run.ops", "what starts a run imports no ops"),
    ("core/__init__.py", "import starlette", "only the server imports its libraries"),
    ("tools/__init__.py", "import uvicorn", "only the server imports its libraries"),
]


_LINT_EACH = """
import contextlib, io, json, os, sys
from importlinter.cli import lint_imports

path, results = sys.path[:], {}
for name in sorted(os.listdir()):
    os.chdir(name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = lint_imports(config_filename="pyproject.toml", no_cache=True)
    results[name] = code, printed.getvalue()
    sys.path[:] = path
    os.chdir("..")
print(json.dumps(results))
"""
"""Lints each folder in the working directory, in one process: starting one takes longer."""


@pytest.fixture(scope="module")
def linted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Return exit code and output for ``clean``, for ``all``, where every layer imports each other,
    and for the number of each planted import."""
    folder = tmp_path_factory.mktemp("planted")
    plant(folder / "clean")
    plant(folder / "all")
    for layer, other in itertools.permutations(_MAY_IMPORT, 2):
        # Modules of their own, which none imports: every chain of imports is one import.
        within = "plugins/experts/gmm" if layer == "plugins" else layer
        importer = folder / f"all/ascend_run/{within}/to_{other}.py"
        importer.write_text(f"import ascend_run.{other}\n")
    for number, (file, line, _) in enumerate(_PLANTED):
        plant(folder / str(number), file, line)
    done = subprocess.run(
        [sys.executable, "-c", _LINT_EACH],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        check=True,
    )
    results: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return results


def plant(folder: Path, file: str = "", line: str = "") -> None:
    """Write a package of empty modules with our contracts, and a line into one of them."""
    modules = ["", *(f"{floor}/" for floor in _FLOORS)]
    for module in (*(f"{one}__init__" for one in modules), "registry/kinds"):
        path = folder / f"ascend_run/{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    if file:
        (folder / "ascend_run" / file).write_text(f"{line}\n")


def test_empty_modules_break_no_contract(linted: dict[str, tuple[int, str]]) -> None:
    code, output = linted["clean"]
    assert code == 0, output


def test_each_layer_may_import_what_is_below_it_and_nothing_else(
    linted: dict[str, tuple[int, str]],
) -> None:
    code, output = linted["all"]
    assert code == 1
    refused = {*re.findall(r"ascend_run\.(\w+)\S*\.to_\w+ ->\s+ascend_run\.(\w+)\s", output)}
    layers = {file.name for file in (ROOT / "ascend_run").iterdir() if file.is_dir()}
    assert layers - {"__pycache__"} == {*_MAY_IMPORT}
    allowed = {layer: {*others.split()} for layer, others in _MAY_IMPORT.items()}
    for layer, other in itertools.permutations(_MAY_IMPORT, 2):
        assert ((layer, other) in refused) == (other not in allowed[layer]), f"{layer} -> {other}"


@pytest.mark.parametrize("number", range(len(_PLANTED)), ids=lambda n: " ".join(_PLANTED[n])[:80])
def test_an_import_against_the_direction_breaks_its_contract(
    linted: dict[str, tuple[int, str]], number: int
) -> None:
    _, _, contract = _PLANTED[number]
    code, output = linted[str(number)]
    assert code == 1
    broken = [text for text in output.splitlines() if " BROKEN" in text]
    assert any(contract in text for text in broken), output


@pytest.mark.parametrize("module", _TORCH_FREE)
def test_what_is_torch_free_imports_no_torch(module: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _IMPORT, module], capture_output=True, text=True, timeout=60
    )

    assert process.returncode == 0, process.stderr
    assert not {"torch", "megatron", "numpy"} & {top(name) for name in process.stdout.split()}


def test_text_is_encoded_without_torch() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "ascend_run/text").rglob("*.py"))
    ]
    program = "import importlib, sys\n[importlib.import_module(name) for name in sys.argv[1:]]\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}print(*sys.modules)", *names],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert len(names) > 20
    absent = {"torch", "megatron", "transformers", "pyarrow"}
    assert not absent & {top(name) for name in done.stdout.split()}


def _composed(tree: ast.Module) -> Iterator[int]:
    """Yield the lines where a composed name of a module is imported or searched."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            imports = ast.unparse(node.func).rpartition(".")[2] in _IMPORTERS
            if imports and any(isinstance(part, ast.JoinedStr) for part in ast.walk(node)):
                yield node.lineno


def test_names_of_imported_modules_are_whole() -> None:
    """``make test-changed`` and the hashes of campaigns follow imports and names in strings."""
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "ascend_run").rglob("*.py"))
    }
    assert len(trees) > 500
    assert {file for file, tree in trees.items() if any(_composed(tree))} == {*_OTHERS_MODULES}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("importlib.import_module(f'{__package__}.liger')", [1]),
        ("x = 1\nimport_module(f'ascend_run.ops.{name}')", [2]),
        ("importlib.import_module('ascend_run.ops.rotary')", []),
        ("files(f'{__package__}.assets') / name", [1]),
        ("import_module(f'pyarrow.{name}' if name else 'pyarrow')", [1]),
        ("print(f'{name}.toml')", []),
    ],
)
def test_a_composed_module_name_is_found(source: str, lines: list[int]) -> None:
    assert [*_composed(ast.parse(source))] == lines
