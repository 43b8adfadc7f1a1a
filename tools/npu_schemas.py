"""What torch_npu says of the operators that platform npu calls, written down for the tests.

    python tools/npu_schemas.py FOLDER

FOLDER holds an unpacked torch_npu wheel for the torch of this environment. It is never installed:
torch would load it by itself. Without CANN it imports beside stand-ins: shared libraries of the
names it needs, in which every symbol that nothing else defines is a function that returns 0.
Schemas and meta kernels are torch_npu's own and need no more.

It writes ``tests/plugins/npu/schemas.json``: the version, the schema of each operator, and the
shapes and dtypes that its meta kernel answers to ``tests/plugins/npu/calls``, which makes each
call through ``plugins/npu/operators``. A call that the schema does not take fails here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "tests/plugins/npu/schemas.json"
_READY = "ASCEND_RUN_STAND_INS"


def undefined_symbols(library: Path) -> set[str]:
    """Dynamic symbols that a library expects from elsewhere."""
    return _symbols(library, "--undefined-only")


def _symbols(library: Path, which: str) -> set[str]:
    answer = subprocess.run(
        ["nm", "-D", which, str(library)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1].partition("@")[0] for line in answer.splitlines() if line.strip()}


def needed_libraries(library: Path) -> set[str]:
    """File names of the libraries that a library is linked to."""
    answer = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", answer))


def build_stand_ins(package: Path, folder: Path) -> None:
    """Libraries that torch_npu is linked to and that are nowhere, with what it wants of them."""
    import torch

    names = ("libtorch_npu.so", "libnpu_profiler.so", "libtensorpipe.so")
    libraries = [package / "torch_npu/lib" / name for name in names]
    libraries += (package / "torch_npu").glob("_C*.so")
    torch_folder = Path(torch.__file__).parent / "lib"
    present = [*libraries, *torch_folder.glob("*.so*"), *(package / "torch_npu/lib").glob("*.so")]
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {Path(line.split()[-1]) for line in maps if ".so" in line}
    defined: set[str] = set()
    for library in {*present, *loaded}:
        if library.exists():
            defined |= _symbols(library, "--defined-only")
    defined |= _symbols(Path(sys.executable).resolve(), "--defined-only")
    missing = {s for library in libraries for s in undefined_symbols(library)} - defined
    # Thread-local initialisers are found by their absence; weak hooks of the C runtime are none.
    missing = {s for s in missing if not s.startswith(("_ZTH", "__gmon", "_ITM", "__cxa_fin"))}
    source = folder / "stand_ins.c"
    source.write_text("".join(f"long {symbol}() {{ return 0; }}\n" for symbol in sorted(missing)))
    wanted = {name for library in libraries for name in needed_libraries(library)}
    wanted -= {path.name for path in present}
    absent = [name for name in sorted(wanted) if not _is_found(name)]
    for number, name in enumerate(absent):
        content = [str(source)] if number == 0 else ["-x", "c", "/dev/null"]
        command = ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        subprocess.run([*command, "-o", str(folder / name), *content], check=True)


def _is_found(name: str) -> bool:
    import ctypes

    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def start_again(package: Path) -> None:
    """This program, with the stand-ins where the loader looks."""
    with tempfile.TemporaryDirectory() as folder:
        build_stand_ins(package, Path(folder))
        environment = {
            **os.environ,
            _READY: "1",
            "LD_LIBRARY_PATH": folder,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)]),
        }
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)


def describe(value: Any) -> Any:
    """Shapes and dtypes of an answer, as JSON."""
    import torch

    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype).removeprefix("torch.")]
    return [describe(item) for item in value]


def operators_called() -> Iterator[str]:
    """Names behind ``torch.ops.npu`` in the one package that calls them."""
    modules = (ROOT / "ascend_run/plugins/npu/operators").glob("*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in modules)
    yield from sorted(set(re.findall(r"torch\.ops\.npu\.(\w+)", source)))


def main() -> None:
    package = Path(sys.argv[1])
    if _READY not in os.environ:
        start_again(package)
    import torch
    import torch_npu  # noqa: F401
    from torch_npu.op_plugin.meta import _meta_registrations

    # Before it warns, once, it asks the device for its generation.
    _meta_registrations._npu_fusion_attention_warning_printed = True

    from tests.plugins.npu.calls import CALLS

    schemas = {
        name: str(getattr(torch.ops.npu, name).default._schema) for name in operators_called()
    }
    answers = {name: describe(call(torch.device("meta"))) for name, call in CALLS.items()}
    (metadata,) = importlib.metadata.distributions(name="torch_npu", path=[str(package)])
    content = {"torch_npu": metadata.version, "schemas": schemas, "meta": answers}
    OUTPUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
