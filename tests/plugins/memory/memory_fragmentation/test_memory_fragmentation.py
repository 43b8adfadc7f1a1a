"""Which allocations are in the pool, and what a run on the CPU says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ascend_run import testing
from ascend_run.ops.memory.allocation_trace import Allocation
from ascend_run.plugin_api import ConfigError, Numerics, RunPhase
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.memory_fragmentation import (
    MemoryFragmentation,
    MemoryFragmentationConfig,
)
from ascend_run.plugins.memory.memory_fragmentation.trace import AllocationTrace
from ascend_run.prepare.rank_start import set_environment
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from tests.support.costs import planned

from .jobs import NAME, in_the_pool, on_the_npu

KIB = 1024
MIB = 1024 * KIB
BUILT = {RunPhase.MODEL, RunPhase.OPTIMIZER}


def plugin(**options: Any) -> MemoryFragmentation:
    return MemoryFragmentation(MemoryFragmentationConfig(**options))


@pytest.mark.parametrize(
    ("model", "precision", "ranks", "per_weight"),
    [(DENSE, "fp32", 1, 1 + 1 + 3), (MOE, "bf16", 2, 1 + 1 + 1 + 3)],
    ids=["weights and states", "gradient buffers and master weights"],
)
def test_what_lasts_is_allocated_in_the_pool(
    gloo_pool: GlooPool, model: Mapping[str, Any], precision: str, ranks: int, per_weight: int
) -> None:
    """Which is entered for the model, its optimizer and the first update only."""
    values = {**model, "train.precision": precision}
    for stay, elsewhere, entered in gloo_pool.run(in_the_pool, ranks, values):
        assert stay > 10 * per_weight
        assert stay % per_weight == 0
        assert elsewhere == 0
        assert entered == 3


@pytest.mark.parametrize("has_states", [False, True], ids=["no states", "states"])
def test_phases_are_in_the_pool_if_they_allocate_what_stays(*, has_states: bool) -> None:
    """The states of a resumed run are created by the checkpoint that it loads."""
    entered: list[str] = []
    state = {"weight": {"exp_avg": torch.zeros(1)}} if has_states else {"weight": {}}
    part = SimpleNamespace(optimizer=SimpleNamespace(state=state))
    context: Any = SimpleNamespace(
        device=SimpleNamespace(memory_pool=lambda: lambda: entered.append("pool")),
        models={"policy": SimpleNamespace(optimizer=SimpleNamespace(chained_optimizers=[part]))},
    )
    pooled = set()
    for phase in RunPhase:
        scope = plugin().ascend_phase(context=context, phase=phase)
        if scope is not None:
            scope()
        if entered:
            pooled.add(phase)
        entered.clear()
    creates_states: set[RunPhase] = set() if has_states else {RunPhase.UPDATE, RunPhase.CHECKPOINT}
    assert pooled == BUILT | creates_states


def test_on_the_npu_one_pool_of_the_device_is_entered(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(on_the_npu, 1, DENSE, timeout=60) == [(1, 3)]


def test_a_trace_has_every_storage_until_it_is_freed() -> None:
    trace = AllocationTrace(torch.device("cpu"))
    with trace.within(long_lived=True):
        weight = torch.zeros(4 * KIB, dtype=torch.uint8)
    with trace.within(long_lived=False):
        output = weight[:KIB] + 1
        del output
        weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(8 * KIB)
    with trace.within(long_lived=True):
        pass
    before = [*trace.allocations]
    one_pool, two_pools = trace.end()
    del weight
    expected = [(0, 4 * KIB, True), (1, KIB), (1, 0), (0, 0), (2, 8 * KIB)]
    assert before == trace.allocations == [Allocation(*row) for row in expected]
    assert one_pool.allocated == two_pools.allocated == 8 * KIB
    assert (one_pool.reserved, two_pools.reserved) == (2 * MIB, 4 * MIB)


def replayed(steps: int) -> dict[str, Any]:
    """What a run logs of its pools."""
    run = testing.run(NAME, {"model.num_layers": 1, "platform": "cpu"}, steps=steps)
    lines = map(json.loads, (run.folder / "log.jsonl").read_text().splitlines())
    (found,) = (line for line in lines if line["event"] == f"{NAME}.replayed")
    return found


def test_a_run_on_the_cpu_logs_what_pools_would_reserve() -> None:
    """A tiny model fits one segment of small blocks, so that a second pool costs another one."""
    line = replayed(3)
    assert line["steps"] == 2
    assert (line["one_pool_bytes"], line["two_pools_bytes"]) == (2 * MIB, 4 * MIB)
    assert 0 < line["allocated_bytes"] < 2 * MIB
    assert replayed(1)["steps"] == 1, "a run with fewer steps"


def test_without_pools_and_steps_nothing_is_around_a_phase() -> None:
    context: Any = SimpleNamespace(
        device=SimpleNamespace(memory_pool=lambda: None, torch_device=torch.device("cpu"))
    )
    phases = [
        {p for p in RunPhase if plugin(traced_steps=n).ascend_phase(context=context, phase=p)}
        for n in (0, 1)
    ]
    assert phases == [set(), {*RunPhase} - {RunPhase.EVALUATION, RunPhase.REFERENCE}]


@pytest.mark.parametrize(
    ("model", "layout"), [("dense", {"pp": 2}), ("moe", {})], ids=["dense", "moe"]
)
def test_no_bit_changes(parity: Parity, model: str, layout: Mapping[str, int]) -> None:
    parity(NAME, model=model, layout=layout)


@pytest.mark.parametrize(
    ("platform", "given", "expected"),
    [
        ("cpu", {}, {}),
        ("cuda", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("npu", {}, {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}),
        (
            "cuda",
            {"PYTORCH_CUDA_ALLOC_CONF": "pinned_num_register_threads:4"},
            {"PYTORCH_CUDA_ALLOC_CONF": "pinned_num_register_threads:4,expandable_segments:True"},
        ),
        (
            "npu",
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,x:1"},
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,x:1"},
        ),
        (
            "cuda",
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False, divisions:[64:1,128:2]"},
            {"PYTORCH_ALLOC_CONF": "divisions:[64:1,128:2],expandable_segments:True"},
        ),
    ],
    ids=["cpu", "cuda", "npu", "other settings", "already set", "off"],
)
def test_expandable_segments_are_a_setting_of_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    given: Mapping[str, str],
    expected: Mapping[str, str],
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    config: Any = SimpleNamespace(platform=platform)
    assert plugin(expandable_segments=True).ascend_environment(config=config) == expected
    assert plugin().ascend_environment(config=config) == {}


def test_the_message_has_the_settings_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "PYTORCH_ALLOC_CONF"
    monkeypatch.setenv(name, "max_split_size_mb:128")
    values = {"platform": "cuda", f"plugins.{NAME}.expandable_segments": True}
    prepared, _ = planned({**DENSE, **values}, (NAME,))
    with pytest.raises(ConfigError) as caught:
        set_environment(prepared, 1)
    (problem,) = caught.value.problems
    assert problem == (
        f"{name}='max_split_size_mb:128': an enabled plugin needs "
        "'max_split_size_mb:128,expandable_segments:True'; set it to that"
    )


def test_declarations() -> None:
    assert claims_of(MemoryFragmentation) == ()
    assert MemoryFragmentation.manifest.numerics is Numerics.BITWISE
    assert set(MemoryFragmentation.manifest.conflicts) == {"compile", "swap-optimizer"}
    with pytest.raises(ValueError, match="traced_steps"):
        MemoryFragmentationConfig(traced_steps=-1)
