"""What each part of the facade promises Megatron."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_run.plugins.cpu.device import CpuDevice
from ascend_run.plugins.cpu.facade import facade_table
from ascend_run.plugins.cpu.facade.megatron import MODULES_THAT_NAME_CUDA, torch_view

NUM_ROWS = 94
"""A new row is a decision: it changes this number and the docs page."""

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
    "tensor_parallel/layers",
    "transformer/cuda_graphs",
    "transformer/custom_layers",
    "transformer/fsdp_dtensor_checkpoint",
)
"""Parts of Megatron that need CUDA kernels or infer only, or name no device of a tensor."""


@pytest.fixture
def active() -> Iterator[CpuDevice]:
    device = CpuDevice()
    device.activate()
    yield device
    device.deactivate()


def test_the_table_has_a_known_number_of_rows_each_with_a_reason() -> None:
    rows = facade_table(CpuDevice())
    assert len(rows) == NUM_ROWS
    assert all(len(row.why) > 5 for row in rows)
    assert max(Counter(row.target for row in rows).values()) == 1


def _names_cuda(source: str) -> bool:
    """Whether a module passes a CUDA device, or asks a factory for pinned memory."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            if keyword.arg == "pin_memory" and isinstance(keyword.value, ast.Constant):
                return True
        arguments = [*node.args, *(k.value for k in node.keywords)]
        if any(isinstance(a, ast.Constant) and a.value == "cuda" for a in arguments):
            return True
    return False


def test_every_training_module_of_megatron_that_names_cuda_is_in_the_table() -> None:
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


def test_an_event_that_was_not_recorded_has_no_distance(active: CpuDevice) -> None:
    with pytest.raises(RuntimeError, match="recorded"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event())


def test_the_device_is_a_device_and_memory_is_read_from_it(active: CpuDevice) -> None:
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.cuda.memory_allocated() > 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 0
    assert not torch.cuda.is_available()  # torch itself must not take the facade for CUDA


def test_dropout_draws_from_the_device_and_leaves_the_cpu_generator_alone(
    active: CpuDevice,
) -> None:
    x = torch.ones(1000, requires_grad=True)
    torch.manual_seed(1)  # seeds both, as on an accelerator
    cpu_state = torch.get_rng_state()
    first = F.dropout(x, 0.25)
    second = F.dropout(x, 0.25)
    assert torch.equal(torch.get_rng_state(), cpu_state)
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(1)
    assert torch.equal(F.dropout(x, 0.25), first)
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())


def test_dropout_keeps_the_edges_of_torch(active: CpuDevice) -> None:
    x = torch.ones(10)
    assert F.dropout(x, 0.5, training=False) is x
    assert F.dropout(x, 1.0).count_nonzero() == 0
    assert F.dropout(x.clone(), 0.5, inplace=True).shape == x.shape
    with pytest.raises(ValueError, match="between 0 and 1"):
        F.dropout(x, 1.5)


def test_weights_are_drawn_on_the_device_unless_a_generator_is_given(active: CpuDevice) -> None:
    cpu_state = torch.get_rng_state()
    torch.cuda.manual_seed(3)
    first = torch.nn.init.normal_(torch.empty(50), 0.0, 0.02)
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.nn.init.normal_(torch.empty(50), 0.0, 0.02), first)
    torch.nn.init.uniform_(torch.empty(5))
    torch.nn.init.trunc_normal_(torch.empty(5))
    assert torch.equal(torch.get_rng_state(), cpu_state)
    own = torch.Generator().manual_seed(5)
    drawn = torch.nn.init.normal_(torch.empty(5), generator=own)
    assert torch.equal(drawn, torch.empty(5).normal_(generator=torch.Generator().manual_seed(5)))


def test_megatrons_tracker_keeps_streams_of_device_randomness(active: CpuDevice) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    cpu_state = torch.get_rng_state()
    torch.cuda.manual_seed(1)
    outside = F.dropout(torch.ones(100))
    with tracker.fork():
        inside = F.dropout(torch.ones(100))
    torch.cuda.manual_seed(1)
    assert torch.equal(F.dropout(torch.ones(100)), outside)
    torch.cuda.manual_seed(7)
    assert torch.equal(F.dropout(torch.ones(100)), inside)
    assert torch.equal(torch.get_rng_state(), cpu_state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_that_torchs_own_checkpoint_recomputes_is_the_same(
    active: CpuDevice, reentrant: bool
) -> None:
    x = torch.ones(200, requires_grad=True)
    out = checkpoint(lambda y: F.dropout(y, 0.5) * y, x, use_reentrant=reentrant)
    state = torch.cuda.get_rng_state()
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * out.detach())
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_torch_compile_still_tells_torchs_functions_apart(active: CpuDevice) -> None:
    from torch._dynamo import trace_rules

    trace_rules.clear_lru_cache()
    assert trace_rules.get_torch_obj_rule_map()
