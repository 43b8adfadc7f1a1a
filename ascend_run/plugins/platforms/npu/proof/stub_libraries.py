"""Run Python with torch_npu on a machine without CANN.

torch_npu is linked to libraries of CANN. For the missing ones, gcc builds stub libraries of their
names, in which every undefined symbol is a function that returns 0. Then torch_npu can be imported,
and its schemas and meta kernels work; nothing can be computed.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ascend_run.plugin_api import AscendRunError

_TOOLS: Final = ("gcc", "nm", "readelf")
_LINKED: Final = ("libtorch_npu.so", "libnpu_profiler.so", "libtensorpipe.so")
_NO_FUNCTIONS: Final = ("_ZTH", "__gmon", "_ITM", "__cxa_fin")
"""Thread-local initializers, which the runtime detects by their absence, and weak hooks of the C
runtime."""


def run_beside(
    package: Path, arguments: Sequence[str], *, extra_path: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run this Python with torch_npu and its stub libraries on the import path.

    Args:
        package: The folder that holds ``torch_npu``: ``site-packages``, or an unpacked wheel.
        arguments: Arguments of the Python command.
        extra_path: Further folders to import from.

    Raises:
        AscendRunError: A tool that builds the stub libraries is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        build(package, Path(folder))
        environment = {**os.environ, **_environment(package, Path(folder), extra_path)}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def _environment(package: Path, folder: Path, extra_path: Sequence[Path]) -> Mapping[str, str]:
    places = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH", "")])]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(places),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch would import it before the program starts
        "PYTHONPATH": os.pathsep.join(map(str, (package, *extra_path))),
    }


def build(package: Path, folder: Path) -> list[str]:
    """Build stub libraries for the missing libraries of torch_npu; return their names."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise AscendRunError(
            f"torch_npu cannot be run without CANN: {', '.join(missing)} not found; install gcc "
            "and binutils"
        )
    import torch

    own = package / "torch_npu/lib"
    libraries = [own / name for name in _LINKED if (own / name).exists()]
    libraries += (package / "torch_npu").glob("_C*.so")
    present = [*libraries, *(Path(torch.__file__).parent / "lib").glob("*.so*"), *own.glob("*.so")]
    wanted = {name for library in libraries for name in _needed_libraries(library)}
    absent = sorted(n for n in wanted - {path.name for path in present} if not _is_found(n))
    if absent:
        source = folder / "stubs.c"
        functions = sorted(_undefined(libraries) - _defined(present))
        functions = [name for name in functions if not name.startswith(_NO_FUNCTIONS)]
        source.write_text("".join(f"long {name}() {{ return 0; }}\n" for name in functions))
    for number, name in enumerate(absent):
        content = [str(source)] if number == 0 else ["-x", "c", os.devnull]
        command = ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        subprocess.run([*command, "-o", str(folder / name), *content], check=True)
    return absent


def _undefined(libraries: Sequence[Path]) -> set[str]:
    """Return the dynamic symbols that libraries expect from elsewhere."""
    return {symbol for library in libraries for symbol in _symbols(library, "--undefined-only")}


def _defined(present: Sequence[Path]) -> set[str]:
    """Return the dynamic symbols of these libraries, of this process and of Python."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {Path(line.split()[-1]) for line in maps if ".so" in line}
    places = {*present, *loaded, Path(sys.executable).resolve()}
    return {s for path in places if path.exists() for s in _symbols(path, "--defined-only")}


def _symbols(library: Path, which: str) -> set[str]:
    command = ["nm", "-D", which, str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip()}


def _needed_libraries(library: Path) -> set[str]:
    command = ["readelf", "-d", str(library)]
    result = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", result))


def _is_found(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
