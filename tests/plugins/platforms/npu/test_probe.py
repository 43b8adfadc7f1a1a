"""The probe of a machine's own torch_npu: read from its files, or imported with stub libraries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ascend_run.plugin_api import AscendRunError
from ascend_run.plugins.platforms.npu.proof import probe, stub_libraries
from ascend_run.plugins.platforms.npu.proof.calls import Call
from ascend_run.plugins.platforms.npu.proof.libraries import schema_strings
from ascend_run.plugins.platforms.npu.proof.recording import recorded_calls

from .calls import CALLS
from .reference import RECORD


def package_of(folder: Path, schemas: list[str]) -> Path:
    """Write a torch_npu that consists only of schemas."""
    library = folder / "torch_npu/lib/libtorch_npu.so"
    library.parent.mkdir(parents=True)
    constants = [schema.removeprefix("npu::").encode() for schema in schemas]
    library.write_bytes(b"\x7fELF\0noise) -> \0" + b"\0".join(constants) + b"\0more\0")
    return folder


def test_a_torch_npu_that_takes_every_call_gives_no_findings(tmp_path: Path) -> None:
    package = package_of(tmp_path, [*RECORD["schemas"].values()])
    assert probe.findings(package) == []
    assert probe.packages(["/nowhere", str(tmp_path)]) == [tmp_path]


def test_what_it_does_not_take_is_named_with_operator_and_argument(tmp_path: Path) -> None:
    schemas = {**RECORD["schemas"]}
    del schemas["npu_swiglu_backward"]
    schemas["npu_rms_norm"] = schemas["npu_rms_norm"].replace("float epsilon", "*, float epsilon")
    assert probe.findings(package_of(tmp_path, [*schemas.values()])) == [
        "npu_rms_norm takes 2 arguments by position, not 3",
        "npu_swiglu_backward is not there",
    ]


def test_a_folder_without_torch_npu_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AscendRunError, match="no torch_npu in"):
        probe.findings(tmp_path)


def test_two_schemas_of_one_operator_are_refused() -> None:
    with pytest.raises(AscendRunError, match="two schemas of npu_a"):
        schema_strings(b"\0npu_a(Tensor x) -> Tensor\0npu_a(Tensor y) -> Tensor\0")


def test_a_recorded_call_is_rebuilt_as_it_was() -> None:
    import torch

    device = torch.device("cpu")
    for name in ("grouped matmul transposed", "grouped outer", "rms_norm bfloat16"):
        with recorded_calls() as recorder:
            CALLS[name](device)
        (call,) = recorder.calls
        assert Call.from_json(call.to_json()) == call
        args = [value.rebuilt(device) for value in call.positional]
        kwargs = {name: value.rebuilt(device) for name, value in call.by_name}
        assert Call.of(call.operator, args, kwargs) == call


def test_what_no_operator_takes_cannot_be_recorded() -> None:
    for value in (object(), [1, "two"]):
        with pytest.raises(TypeError, match="is no argument of an operator"):
            Call.of("npu_swiglu", (value,), {})


def test_a_library_of_cann_that_is_missing_is_stood_in_for(tmp_path: Path) -> None:
    """A torch_npu linked to the missing library imports, and its functions return 0."""
    lib = tmp_path / "torch_npu/lib"
    lib.mkdir(parents=True)
    cann, own = lib / "libascendfake.so", lib / "libtorch_npu.so"
    (tmp_path / "cann.c").write_text("long aclFake(void) { return 7; }\n")
    (tmp_path / "own.c").write_text("long aclFake(void); long ask(void) { return aclFake(); }\n")
    gcc = ["gcc", "-w", "-shared", "-fPIC"]
    subprocess.run(
        [*gcc, "-Wl,-soname,libascendfake.so", "-o", cann, tmp_path / "cann.c"], check=True
    )
    subprocess.run([*gcc, "-o", own, tmp_path / "own.c", f"-L{lib}", "-lascendfake"], check=True)
    cann.unlink()
    (tmp_path / "torch_npu/__init__.py").write_text(
        f"import ctypes\nprint('ask', ctypes.CDLL({str(own)!r}).ask())\n"
    )
    done = stub_libraries.run_beside(tmp_path, ["-c", "import torch_npu"])
    assert done.stdout.split() == ["ask", "0"], done.stderr


def test_tools_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        AscendRunError, match="gcc, nm, readelf not found; install gcc and binutils"
    ):
        stub_libraries.build(tmp_path, tmp_path)
