"""A step's time on a named device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import Communication, ConfigError, Layout, RunConfig
from ascend_run.testing.models import DENSE, MODELS
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from ascend_run.tools.plan.cost_model.devices import DEVICE_NAMES, CostDevice, find_device
from ascend_run.tools.plan.cost_model.estimate import RankCost
from ascend_run.tools.plan.cost_model.step_time import (
    StepTime,
    communication_time,
    group_shape,
    step_time,
)
from tests.support.costs import planned

DEVICE = CostDevice(
    name="round",
    flops={"fp32": 1e9},
    memory_bandwidth=1e9,
    memory_bytes=1e9,
    per_node=4,
    node_bandwidth=100.0,
    network_bandwidth=10.0,
    latency=0.5,
    reach=0.5,
    disk_write_bandwidth=1e4,
    disk_read_bandwidth=4e4,
    operation=1e-5,
)


def all_reduce(group: str) -> Communication:
    return Communication(operation="all_reduce", group=group, calls=2, sent_bytes=400, why="a test")


def test_a_group_is_timed_by_the_link_that_it_spans() -> None:
    layout = Layout(world_size=8, tp=2)
    assert group_shape(layout, all_reduce("tp")) == (2, 2)
    assert group_shape(layout, all_reduce("dp_cp")) == (4, 7)
    # 2 (n - 1) / n of the bytes, and 2 log2(n) rounds for each call
    assert communication_time(layout, all_reduce("tp"), DEVICE) == 400 / 100 + 2 * 2 * 0.5
    assert communication_time(layout, all_reduce("dp_cp"), DEVICE) == 600 / 10 + 2 * 4 * 0.5
    assert communication_time(layout, all_reduce("cp"), DEVICE) == 0


def test_a_step_is_its_matmuls_memory_operations_and_bubble() -> None:
    config = {**DENSE, "parallel.pipeline_model_parallel_size": 2, "train.global_batch_size": 4}
    prepared, costs = planned(config, world_size=2)
    time = step_time(prepared.config, prepared.layout, costs, DEVICE)
    assert time.matmuls == pytest.approx(
        costs[1].flops / 0.5e9
    )  # the last stage has the vocabulary
    assert time.operations == costs[1].operations * DEVICE.operation > 0
    busy = time.matmuls + time.memory + time.operations + time.communication
    assert time.host_copies == time.disk == 0
    assert time.bubble == pytest.approx(busy * (2 - 1) / 4)
    assert time.total == pytest.approx(busy + time.bubble)


SWAPPED = 2 * 4 * 16 * (4 * (32 + 3 * 32 + 2 * 8) + 4 * 8)
"""Two layers, four micro-batches of 16 tokens, each: four bytes of the input of the attention, of
queries, of the output twice, of two heads of keys and values, and of a statistic of each head."""


@pytest.mark.needs_plugins("swap-attention")
def test_activations_leave_during_forward_and_come_back_during_backward() -> None:
    def times(prefetch: int, bandwidth: float | None) -> StepTime:
        own = {"min_bytes": 1, "prefetch": prefetch}
        options = {f"plugins.swap-attention.{name}": value for name, value in own.items()}
        prepared, costs = planned({**DENSE, **options}, ("swap-attention",))
        device = attrs.evolve(DEVICE, host_bandwidth=bandwidth)
        return step_time(prepared.config, prepared.layout, costs, device)

    swift, slow, late = times(1, 1e15), times(1, 1e5), times(0, 1e5)
    prepared, costs = planned(DENSE)
    plain = step_time(prepared.config, prepared.layout, costs, DEVICE)
    states = costs[0].memory.optimizer
    computing = plain.matmuls + plain.memory - 2 * states / 1e9 + plain.operations
    assert swift == plain
    # The second layer's are still on the device when its backward begins.
    back = SWAPPED / 2
    assert slow.host_copies == pytest.approx((SWAPPED + back) / 1e5 - computing)
    assert slow.total == plain.total + slow.host_copies
    # Nothing overlaps what the backward waits for.
    assert late.host_copies == pytest.approx((SWAPPED + back) / 1e5 - computing / 3)
    # Each byte is read and written on its way to the host, and back.
    within = times(1, None)
    assert within.memory - plain.memory == pytest.approx(2 * (SWAPPED + back) / 1e9)
    assert within.host_copies == 0


@pytest.mark.needs_plugins("swap-optimizer")
def test_optimizer_states_come_and_leave_during_the_update() -> None:
    prepared, costs = planned({**DENSE, "train.precision": "bf16"}, ("swap-optimizer",))
    one_way = 12 * costs[0].trained_parameters
    assert costs[0].memory.off_device == one_way
    config, layout = prepared.config, prepared.layout
    inside = attrs.evolve(DEVICE, flops={"bf16": 1e9})
    at_memory_speed, slow = (attrs.evolve(inside, host_bandwidth=rate) for rate in (1e9, 1e6))
    within = step_time(config, layout, costs, inside)
    hidden = step_time(config, layout, costs, at_memory_speed)
    exposed = step_time(config, layout, costs, slow)
    assert hidden.host_copies == within.host_copies == 0
    assert within.memory - hidden.memory == pytest.approx(4 * one_way / 1e9)
    update = 2 * (one_way + costs[0].memory.optimizer) / 1e9
    assert exposed.host_copies == pytest.approx(one_way / 1e6 - update)
    assert exposed.total == hidden.total + exposed.host_copies


@pytest.mark.needs_plugins("virtual-optimizer")
def test_states_are_updated_over_the_link() -> None:
    """And are not copied where device and host are one memory."""
    values = {**DENSE, "train.precision": "bf16"}
    prepared, costs = planned(values, ("virtual-optimizer",))
    one_way = 8 * costs[0].trained_parameters
    assert costs[0].memory.off_device == one_way
    config, layout = prepared.config, prepared.layout
    inside = attrs.evolve(DEVICE, flops={"bf16": 1e9})
    slow = attrs.evolve(inside, host_bandwidth=1e6)
    within = step_time(config, layout, costs, inside)
    plain = step_time(config, layout, planned(values)[1], inside)
    exposed = step_time(config, layout, costs, slow)
    assert within == plain
    update = 2 * (one_way + costs[0].memory.optimizer) / 1e9
    assert exposed.host_copies == pytest.approx(one_way / 1e6 - update)
    assert exposed.total == within.total + exposed.host_copies


@pytest.mark.needs_plugins("swap-attention")
@pytest.mark.parametrize("prefetch", [0, 1])
def test_nothing_overlaps_reads_and_writes_of_files(tmp_path: Path, prefetch: int) -> None:
    """Not even a prefetch. The ranks of a shared machine share its disk, and a link between device
    and host is passed on the way."""
    own = {"min_bytes": 1, "prefetch": prefetch, "folder": str(tmp_path)}
    options = {f"plugins.swap-attention.{name}": value for name, value in own.items()}
    prepared, costs = planned({**DENSE, **options}, ("swap-attention",))
    config, layout = prepared.config, prepared.layout
    plain = step_time(*of_plain(DENSE), DEVICE)
    written, read = SWAPPED, SWAPPED / 2

    time = step_time(config, layout, costs, DEVICE)
    assert time.disk == pytest.approx(written / 1e4 + read / 4e4)
    assert time.host_copies == 0
    assert time.memory - plain.memory == pytest.approx(2 * (written + read) / 1e9)
    assert time.total == pytest.approx(plain.total + time.disk + time.memory - plain.memory)

    with_link = step_time(config, layout, costs, attrs.evolve(DEVICE, host_bandwidth=1e5))
    assert with_link.host_copies == pytest.approx((written + read) / 1e5)
    assert (with_link.disk, with_link.memory) == (time.disk, plain.memory)

    both = attrs.evolve(config, run=attrs.evolve(config.run, nproc=2))
    beside = step_time(both, Layout(world_size=2), costs, attrs.evolve(DEVICE, shared=True))
    assert beside.disk == pytest.approx(2 * time.disk)


@pytest.mark.parametrize(
    ("name", "item"),
    [
        pytest.param(name, item, marks=pytest.mark.needs_plugins(name))
        for name, item in (("swap-optimizer", 12), ("virtual-optimizer", 8))
    ],
)
def test_states_in_files_are_read_and_written(tmp_path: Path, name: str, item: int) -> None:
    values = {**DENSE, "train.precision": "bf16", f"plugins.{name}.folder": str(tmp_path)}
    prepared, costs = planned(values, (name,))
    states = item * costs[0].trained_parameters
    device = attrs.evolve(DEVICE, flops={"bf16": 1e9}, host_bandwidth=1e6)
    time = step_time(prepared.config, prepared.layout, costs, device)
    assert time.disk == pytest.approx(states / 1e4 + states / 4e4)
    assert time.host_copies == pytest.approx(2 * states / 1e6)


def of_plain(values: Mapping[str, Any]) -> tuple[RunConfig, Layout, Sequence[RankCost]]:
    prepared, costs = planned(values)
    return prepared.config, prepared.layout, costs


@pytest.mark.parametrize("name", DEVICE_NAMES)
def test_every_device_names_the_source_of_its_constants(name: str) -> None:
    device = find_device(name)
    assert len(device.source) > 20
    assert {*device.flops} == {"bf16", "fp16", "fp32"}
    for precision, peak in device.flops.items():
        assert 0 < device.matmul_flops(precision) <= peak


def test_the_rate_of_the_910b_is_that_of_its_cube_cores() -> None:
    cores, products_a_cycle, frequency = 24, 16**3, 1.8e9
    rates = find_device("ascend-910b").flops
    assert rates["bf16"] == pytest.approx(2 * cores * products_a_cycle * frequency, rel=1e-3)
    assert rates["fp32"] == pytest.approx(rates["bf16"] / 4, rel=1e-3)
    # What large matmuls were measured to reach (github.com/gameofdimension/limulidae).
    assert 0.9 * rates["bf16"] < 328e12 < rates["bf16"]
    assert 0.9 * rates["fp32"] < 87e12 < rates["fp32"]


def test_a_share_can_be_one_for_each_precision() -> None:
    both = attrs.evolve(DEVICE, flops={"fp32": 1e9, "bf16": 4e9}, reach={"fp32": 0.5, "bf16": 0.25})
    assert both.matmul_flops("fp32") == 0.5e9
    assert both.matmul_flops("bf16") == 1e9
    with pytest.raises(ValueError, match="for each precision"):
        attrs.evolve(both, reach={"fp32": 0.5})


def test_a_device_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(attrs.asdict(DEVICE)))
    assert find_device(str(path)) == DEVICE


def test_a_link_to_the_host_is_assumed_where_a_file_has_none(tmp_path: Path) -> None:
    """Unless its machine is shared, or it says that there is none."""
    path = tmp_path / "mine.json"
    values = {**attrs.asdict(DEVICE), "source": "mine"}
    del values["host_bandwidth"]
    path.write_text(json.dumps(values))
    found = find_device(str(path))
    assert found.host_bandwidth == 31.5e9
    assert found.source == "mine; to the host 31.5 GB/s, which is assumed"
    assert attrs.evolve(found, host_bandwidth=None, source="") == DEVICE
    path.write_text(json.dumps({**values, "shared": True}))
    assert find_device(str(path)).host_bandwidth is None


def test_a_disk_is_assumed_where_a_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    values = {**attrs.asdict(DEVICE), "source": "mine"}
    del values["disk_write_bandwidth"], values["disk_read_bandwidth"]
    path.write_text(json.dumps(values))
    found = find_device(str(path))
    assert (found.disk_write_bandwidth, found.disk_read_bandwidth) == (4e9, 6.8e9)
    assert found.source == "mine; to a disk 4.0 GB/s and from it 6.8 GB/s, which is assumed"
    assert all("disk" in find_device(name).source for name in ("ascend-910b", "h100", "h200"))
    assert "disk" in find_device("cpu").source


@pytest.mark.parametrize("content", ["{}", "[]", "not json", '{"name": "x", "speed": 3}'])
def test_a_file_that_is_no_device_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="not a device"):
        find_device(str(path))


@pytest.mark.parametrize(
    ("field", "value"),
    [("reach", 0), ("reach", 1.5), ("node_bandwidth", 0), ("memory_bytes", "x"), ("latency", -1),
     ("host_bandwidth", 0), ("disk_read_bandwidth", 0), ("flops", {"bf16": -1})],
)  # fmt: skip
def test_a_value_that_no_device_has_is_named(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**attrs.asdict(DEVICE), field: value}))
    with pytest.raises(ConfigError, match=f"not a device .*{field}"):
        find_device(str(path))


def test_a_precision_that_a_device_has_no_rate_for_is_refused() -> None:
    prepared, costs = planned({**DENSE, "train.precision": "bf16"})
    with pytest.raises(ConfigError, match=r"no rate for train\.precision=bf16"):
        step_time(prepared.config, prepared.layout, costs, DEVICE)


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="ascend-910b, h100, h200, cpu"):
        find_device("abacus")


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_operations_are_about_as_many_as_torch_dispatches(gloo_pool: GlooPool, model: str) -> None:
    config = {**MODELS[model], "model.num_layers": 3, "train.global_batch_size": 2}
    _, (cost,) = planned(config)
    (outcome,) = gloo_pool.run(run_trial, 1, Trial(config=config, steps=1))

    assert cost.operations == pytest.approx(sum(outcome.operations.values()), rel=0.1)


def test_the_attention_can_have_a_share_of_its_own() -> None:
    prepared, (cost,) = planned(DENSE)
    slower = attrs.evolve(DEVICE, attention=0.1)
    assert 0 < cost.attention_flops < cost.flops
    one = step_time(prepared.config, prepared.layout, [cost], DEVICE)
    other = step_time(prepared.config, prepared.layout, [cost], slower)
    assert one.matmuls == pytest.approx(cost.flops / 0.5e9)
    assert other.matmuls - one.matmuls == pytest.approx(
        cost.attention_flops * (1 / 0.1e9 - 1 / 0.5e9)
    )
