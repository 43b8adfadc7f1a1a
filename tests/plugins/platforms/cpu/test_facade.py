"""What each part of the facade guarantees to Megatron."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.core.hooks import Hooks
from ascend_run.core.patches import applied_patches
from ascend_run.plugins.platforms.cpu import Cpu
from ascend_run.plugins.platforms.cpu.device import CpuDevice
from ascend_run.plugins.platforms.cpu.facade import facade_patches
from ascend_run.plugins.platforms.cpu.facade.cuda import Stream
from ascend_run.plugins.platforms.cpu.facade.megatron import MODULES_THAT_NAME_CUDA, torch_view
from ascend_run.plugins.platforms.cpu.facade.sources import SOURCES
from ascend_run.plugins.platforms.cpu.memory import HostMemory
from ascend_run.plugins.platforms.cpu.options import CpuOptions
from tests.support.cpu_facade import cpu_facade

OUT_OF_REACH = (
    "datasets",
    "distributed/fsdp",
    "distributed/torch_fully_sharded_data_parallel",
    "energy_monitor",
    "export",
    "extensions",
    "fp8_utils",
    "full_cuda_graph",
    "fusions",
    "inference",
    "models/vision",
    "nccl_allocator",
    "post_training",
    "resharding",
    "ssm",
    "transformer/cuda_graphs",
    "transformer/custom_layers",
    "transformer/fsdp_dtensor_checkpoint",
)
"""Parts of Megatron that need CUDA kernels, are for inference only, or do not name a tensor's
device."""


def names_in_place() -> dict[str, Any]:
    """Return the value of every target of the platform's patches; None if its owner lacks it."""
    found = {}
    for patch in Cpu(CpuOptions()).ascend_patches():
        module, _, path = patch.target.partition(":")
        *outer, name = path.split(".")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of Megatron and torch at import
            owner = functools.reduce(getattr, outer, importlib.import_module(module))
        found[patch.target] = vars(owner).get(name)
    return found


def test_undoing_the_facade_puts_back_the_very_objects() -> None:
    before = names_in_place()
    # With a GPU, another test may have used it.
    same = {"torch.cuda:_initialized"} if torch.cuda.is_initialized() else set()
    with applied_patches(Hooks([Cpu(CpuOptions())])):
        during = names_in_place()
    after = names_in_place()
    unchanged = [name for name in before if during[name] is before[name]]
    # Megatron lacks this name without Transformer Engine, so None is None.
    assert {*unchanged} == {"megatron.core.transformer.moe.moe_utils:te_general_gemm"} | same
    assert [name for name in before if after[name] is not before[name]] == []


def test_every_recorded_source_belongs_to_a_row() -> None:
    used = {hash for row in facade_patches(HostMemory()) for hash in row.source_hash}
    unused = [name for name, hashes in SOURCES.items() if not {*hashes.values()} & used]
    assert unused == []


def test_a_gpu_of_the_machine_is_not_seen() -> None:
    """With one, torch.compile would read its properties for a graph on the CPU; after the run it
    looks again."""
    from torch.utils._triton import has_triton

    real = torch.cuda.is_available
    has_triton.cache_clear()
    with cpu_facade():
        assert torch.cuda.is_available is not real
        assert not torch.cuda.is_available()
        assert not has_triton()
        assert has_triton.cache_info().currsize == 1
    assert torch.cuda.is_available is real
    assert has_triton.cache_info().currsize == 0


def test_a_dispatchers_stream_stays_within_the_facade() -> None:
    """Megatron makes one for all dispatchers of the process, which may train elsewhere next."""
    from megatron.core.transformer.moe.token_dispatcher import (
        MoEAlltoAllTokenDispatcher as Megatrons,
    )

    before = Megatrons.cuda_dtoh_stream
    with cpu_facade():
        assert isinstance(Megatrons.cuda_dtoh_stream, Stream)
    assert Megatrons.cuda_dtoh_stream is before


def test_the_device_and_torch_cuda_share_a_peak() -> None:
    with cpu_facade() as device:
        device.reset_peak_memory()
        assert torch.cuda.max_memory_allocated() == device.memory_bytes()[1]


def _names_cuda(source: str) -> bool:
    """Return whether a module passes a CUDA device, by name or index, or requests pinned memory."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "current_device":
            return True
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            if keyword.arg == "pin_memory" and isinstance(keyword.value, ast.Constant):
                return True
        arguments = [*node.args, *(k.value for k in node.keywords)]
        if any(isinstance(a, ast.Constant) and a.value == "cuda" for a in arguments):
            return True
    return False


def test_every_megatron_training_module_naming_cuda_is_in_the_table() -> None:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    found = set()
    for file in root.rglob("*.py"):
        relative = file.relative_to(root).with_suffix("")
        if str(relative).startswith(OUT_OF_REACH) or not _names_cuda(file.read_text()):
            continue
        found.add(".".join(("megatron.core", *relative.parts)))
    assert found - set(MODULES_THAT_NAME_CUDA) == set()


def test_a_view_of_torch_makes_tensors_on_the_cpu_where_cuda_is_named() -> None:
    view = torch_view()
    assert view.zeros(2, device="cuda").device.type == "cpu"
    assert view.tensor([1.0], device="cuda:0", pin_memory=True).device.type == "cpu"
    assert view.empty_like(torch.ones(1), device=torch.device("cuda", 1)).device.type == "cpu"
    assert view.device("cuda") == view.device("cuda", 3) == view.device(0) == torch.device("cpu")
    assert view.device("meta") == torch.device("meta")
    assert isinstance(torch.device("cpu"), view.device)
    assert not isinstance("cpu", view.device)
    assert view.Generator(device="cuda").device == torch.device("cpu")
    with view.autocast("cuda", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert view.nn is torch.nn
    assert view.library is torch.library


def test_a_tensor_passes_for_one_on_the_device(active: CpuDevice) -> None:
    x = torch.nn.Parameter(torch.ones(2))
    assert x.is_cuda
    assert not torch.ones(1, device="meta").is_cuda
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type(torch.float64).dtype == torch.float64
    assert x.cuda() is x
    assert x.to("cuda").device == x.to(0).device == torch.device("cpu")
    assert x.to(device="cuda:1", dtype=torch.float64).dtype == torch.float64
    assert x.to(torch.float16).dtype == torch.float16
    assert x.pin_memory() is x
    assert x.record_stream(torch.cuda.current_stream()) is None


def test_streams_and_events_take_the_calls_of_overlapped_code(active: CpuDevice) -> None:
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(True), torch.cuda.Event(True)
    with torch.cuda.stream(stream):
        start.record()
        stream.wait_stream(torch.cuda.current_stream())
        end.record(stream)
        stream.wait_event(end)
    assert end.query()
    assert stream.query()
    assert start.elapsed_time(end) >= 0.0
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push("x")
    torch.cuda.nvtx.range_pop()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.cuda.stream(torch.cuda.Stream()),
        lambda: torch.cuda.stream(None),
        lambda: torch.cuda.device(0),
        lambda: torch.cuda.nvtx.range("a range"),
        lambda: torch.cuda.Stream(),
    ],
    ids=["stream", "no-stream", "device", "range", "Stream"],
)
def test_a_context_is_entered_again_and_within_itself(
    active: CpuDevice, make: Callable[[], AbstractContextManager[object]]
) -> None:
    """Megatron enters one context twice; torch's contexts are re-entrant."""
    context = make()
    for _ in range(2):
        with context, context:
            pass
    with pytest.raises(ZeroDivisionError), context:
        _ = 1 / 0


def test_an_event_that_was_not_recorded_has_no_distance(active: CpuDevice) -> None:
    with pytest.raises(RuntimeError, match="recorded"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event())


def test_the_current_device_is_an_index_that_every_taker_knows(active: CpuDevice) -> None:
    view, index, cpu = torch_view(), torch.cuda.current_device(), torch.device("cpu")
    assert type(index) is int
    assert index + 1 == torch.cuda.device_count()
    assert torch.cuda.default_generators[index].device == cpu
    x = torch.ones(2)
    made = [
        *(getattr(view, name)(2, device=index) for name in ("empty", "zeros", "ones", "arange")),
        view.tensor([1], device=index),
        view.full((1,), 2.0, device=index),
        x.to(index),
        x.to(device=index),
        x.cuda(index),
        x.new_empty(2, device=index),
        x.new_empty(size=[2], device=index),
        x.new_full((2,), 1.0, device=index),
        x.new_ones(2, device=index),
        x.new_tensor([2], device=index),
        x.new_zeros(2, device=view.device("cuda", index)),
        torch.nn.Linear(2, 2).to(index).weight,
        torch.nn.Linear(2, 2).cuda(index).weight,
    ]
    assert [tensor.device for tensor in made] == [cpu] * len(made)
    assert torch.nn.Linear(2, 2).to(device="cuda:0", dtype=torch.float64).weight.dtype is (
        torch.float64
    )


def test_memory_is_read_from_the_device(active: CpuDevice) -> None:
    assert torch.cuda.memory_allocated() > 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 0
    assert not torch.cuda.is_available()  # torch itself must not take the facade for CUDA


def test_torch_compile_still_tells_torchs_functions_apart(active: CpuDevice) -> None:
    from torch._dynamo import trace_rules

    trace_rules.clear_lru_cache()
    assert trace_rules.get_torch_obj_rule_map()
