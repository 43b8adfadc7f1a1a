"""The plugin's declarations, refusals, sizes and cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from ascend_run.ops.memory.host_mapped import HostMapped
from ascend_run.plugin_api import ConfigError, Numerics, PlatformError, PluginResolutionError
from ascend_run.plugins.memory.virtual_optimizer import VirtualOptimizer, VirtualOptimizerConfig
from ascend_run.plugins.memory.virtual_optimizer.refusal import refuse_other_optimizers
from ascend_run.plugins.platforms.cpu.device import CpuDevice
from ascend_run.testing.models import DENSE
from tests.support.costs import planned

NAME = ("virtual-optimizer",)
FOLDER = "plugins.virtual-optimizer.folder"
SIZE = "plugins.virtual-optimizer.size"
BF16 = {**DENSE, "train.precision": "bf16"}
DISTRIBUTED = {"ddp.use_distributed_optimizer": True}


def test_it_changes_no_bit() -> None:
    assert VirtualOptimizer.manifest.numerics is Numerics.BITWISE


@pytest.mark.parametrize("size", [(), (0.0,), (0.0, 0.0), (1.0, -1.0)], ids=str)
def test_some_stage_has_a_size(size: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="size must have numbers from 0 on or 'all'"):
        VirtualOptimizerConfig(size=size)


@pytest.mark.parametrize("size", [("all",), (2.5,), (0, "all"), (6, 5, 4, 3)], ids=str)
def test_each_stage_may_have_another_size(size: tuple[Any, ...]) -> None:
    assert VirtualOptimizerConfig(size=size).size == size


def test_an_unknown_word_is_answered_with_numbers_and_all() -> None:
    with pytest.raises(ConfigError, match=r"\[6, 'x'\]: expected .*, each a number or 'all'"):
        planned({**BF16, SIZE: [6, "x"]}, NAME)


def test_sizes_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="size has 2 sizes, and the pipeline 1 stages"):
        planned({**BF16, SIZE: [1.0, "all"]}, NAME)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(name, marks=pytest.mark.needs_plugins(name))
        for name in ("swap-optimizer", "memory-fragmentation")
    ],
)
def test_what_else_moves_or_pools_states_is_refused(other: str) -> None:
    with pytest.raises(PluginResolutionError, match=f"'{NAME[0]}' cannot run with '{other}'"):
        planned(BF16, (other, *NAME))


def test_a_platform_without_such_memory_is_an_error() -> None:
    device = CpuDevice()
    device.name = "another"
    with pytest.raises(PlatformError, match="another has no memory of the host that its operators"):
        VirtualOptimizer(VirtualOptimizerConfig()).ascend_mixed_precision_optimizer(device)


class Few(HostMapped):
    every_operator = False


@attrs.frozen
class Part:
    optimizer: torch.optim.Optimizer
    memory: HostMapped
    device: CpuDevice = attrs.field(factory=CpuDevice)


@attrs.frozen
class Chained:
    chained_optimizers: list[Part]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_another_optimizer_needs_memory_that_every_operator_takes(kind: Any) -> None:
    optimizer, device = kind([torch.ones(1)], lr=0.1), torch.device("cpu")
    refuse_other_optimizers(None)
    refuse_other_optimizers(Chained([Part(optimizer, HostMapped(device))]))
    few = Chained([Part(optimizer, Few(device))])
    if kind is torch.optim.AdamW:
        refuse_other_optimizers(few)
        return
    with pytest.raises(PlatformError, match=r"only the built-in AdamW .* not SGD; use swap-opt"):
        refuse_other_optimizers(few)


@pytest.mark.parametrize("more", [{}, DISTRIBUTED], ids=["replicated", "distributed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plan_counts_states_off_the_device(
    tmp_path: Path, precision: str, more: dict[str, Any]
) -> None:
    """In memory of the host, or in files; the CPU's host is the device. Master weights stay."""
    values = {**DENSE, **more, "train.precision": precision}
    _, (plain,) = planned(values, (), 2)
    _, (host,) = planned(values, NAME, 2)
    _, (file,) = planned({**values, FOLDER: str(tmp_path)}, NAME, 2)
    states = 8 * plain.trained_parameters / (2 if more else 1)
    assert plain.memory.off_device == plain.memory.host == 0
    for cost in (host, file):
        assert plain.memory.optimizer - cost.memory.optimizer == states
        assert cost.memory.off_device == states
        assert cost.memory.copied == cost.memory.host == 0
    assert host.memory.activations - file.memory.activations == states


def test_plan_counts_the_states_that_fit_in_a_size() -> None:
    """Whole tensors of the parameters that are updated first."""
    _, (plain,) = planned(BF16, ())
    first = max(p.numel for p in plain.rank.parameters)
    _, (cost,) = planned({**BF16, SIZE: [4 * first / 2**30]}, NAME)
    assert 0 < cost.memory.off_device <= 4 * first
    assert cost.memory.off_device + cost.memory.optimizer == plain.memory.optimizer
