"""Read the operator schemas from the strings of torch_npu's libraries.

torch_npu registers each operator with a string such as ``npu_swiglu(Tensor input, int dim=-1) ->
Tensor``, which the compiler keeps among the constants of the library. So the arguments of an
operator are known without an import, without CANN and without the torch that the release was built
for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ascend_run.plugin_api import AscendRunError

LIBRARIES = ("torch_npu/lib/libtorch_npu.so", "torch_npu/lib/libop_plugin_atb.so")
"""Libraries in which torch_npu registers operators, relative to the folder of the package. Releases
before 2.8 may lack the second."""

_ARROW = b") -> "
_LONGEST = 8192
_SCHEMA = re.compile(rb"(?:npu::|atb::)?([A-Za-z_]\w*(?:\.\w+)?\([ -~]*)")


def schema_strings(library: bytes) -> dict[str, str]:
    """Return operator with overload, as ``npu_grouped_matmul.List`` -> schema without namespace.

    Raises:
        AscendRunError: One operator has two schemas.
    """
    found: dict[str, str] = {}
    position = 0
    while (arrow := library.find(_ARROW, position)) >= 0:
        start = library.rfind(b"\0", max(0, arrow - _LONGEST), arrow) + 1
        position = end = library.find(b"\0", arrow)
        match = _SCHEMA.fullmatch(library[start:end])
        if match is None or end - start > _LONGEST:
            continue
        schema = match[1].decode("ascii")
        name = schema.partition("(")[0]
        if found.setdefault(name, schema) != schema:
            raise AscendRunError(f"torch_npu's library has two schemas of {name}")
    return found


def merged(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Merge the schemas of several libraries; the first one with an operator wins."""
    found: dict[str, str] = {}
    for part in parts:
        found = {**part, **found}
    return dict(sorted(found.items()))


def installed_schemas(package: Path) -> dict[str, str]:
    """Return the schemas of the torch_npu in a folder (``site-packages``, an unpacked wheel)."""
    present = [package / name for name in LIBRARIES if (package / name).exists()]
    return merged(schema_strings(path.read_bytes()) for path in present)
