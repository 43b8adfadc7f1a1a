"""The choice of a layout, against exhaustive search by ``plan`` and against models whose best
layout is known by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import AscendRunError, ConfigError
from ascend_run.prepare.prepare import prepare_raw
from ascend_run.tools.plan.cost_model import estimate
from ascend_run.tools.plan.cost_model.devices import CostDevice, find_device
from ascend_run.tools.plan.costs import with_costs
from ascend_run.tools.preset import choosing
from ascend_run.tools.preset.candidates import Candidate, candidates, lower_bound_bytes
from ascend_run.tools.preset.choosing import KEPT_FREE, Choice, Search
from ascend_run.tools.preset.runs import raw_config
from ascend_run.types.optimizer import OptimizerSpec, OptimizerState

pytestmark = pytest.mark.needs_plugins("llama")

DEVICE = attrs.evolve(find_device("ascend-910b"), memory_bytes=2.0**40)
SLOW = attrs.evolve(DEVICE, name="slow", flops={"bf16": 1e12}, memory_bandwidth=1e15)
"""Its matmuls take most of a step, so that the bubble decides."""
FAR = attrs.evolve(SLOW, name="far", node_bandwidth=5e8)
"""Its links are slow too, so that collectives decide."""
LARGE = 2.0**40
MODEL: dict[str, Any] = {
    "platform": "npu",
    "model.family": "llama",
    "model.num_layers": 4,
    "model.hidden_size": 256,
    "model.ffn_hidden_size": 512,
    "model.num_attention_heads": 4,
    "model.vocab_size": 1024,
    "data.train": ["data/train"],
    "data.seq_length": 512,
    "train.global_batch_size": 8,
}
ONE_HEAD = {**MODEL, "model.num_attention_heads": 1, "train.global_batch_size": 1}
EXPERTS = {
    **MODEL,
    "model.family": "mixtral",
    "model.num_moe_experts": 8,
    "model.ffn_hidden_size": 4096,
    "model.moe_ffn_hidden_size": 4096,
}


def chosen(
    values: Mapping[str, Any],
    *,
    devices: int = 8,
    memory: float = LARGE,
    device: CostDevice = DEVICE,
) -> Choice:
    return Search(values, devices, memory, device).choose()


def planned(
    values: Mapping[str, Any], candidate: Candidate, devices: int, device: str
) -> tuple[float, float] | None:
    """(peak bytes, step time) of a layout, by the path of ``ascend-run plan``; None: it cannot
    run."""
    own = candidate.values(devices, experts="model.num_moe_experts" in values)
    try:
        prepared = prepare_raw(raw_config({**values, **own}, "test"), devices)
    except AscendRunError:
        return None
    cost: Any = with_costs(prepared, device).plan
    return max(stage.memory.peak for stage in cost.cost.stages), cost.cost.time.step


@attrs.frozen
class Exhaustive:
    """Every layout of the small model on 4 devices, with every recomputation."""

    device: CostDevice
    found: Mapping[Candidate, tuple[float, float]]
    """Layout -> (peak bytes, step time)."""


@pytest.fixture(scope="module", params=[SLOW, FAR], ids=lambda device: device.name)
def exhaustive(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Exhaustive:
    model = prepare_raw(raw_config(MODEL, "test"), 1).config.model
    device = tmp_path_factory.mktemp("device") / "slow.json"
    device.write_text(json.dumps(attrs.asdict(request.param)))
    every = {}
    for candidate in candidates(model, 4, 8, split_sequence=False):
        for recompute in ("none", "selective", "full"):
            one = attrs.evolve(candidate, recompute=recompute)
            if (found := planned(MODEL, one, 4, str(device))) is not None:
                every[one] = found
    return Exhaustive(request.param, every)


@pytest.mark.parametrize("share", [1.0, 0.7, 0.4, 0.2])
def test_the_choice_is_the_fastest_of_all_that_fit(exhaustive: Exhaustive, share: float) -> None:
    """``share``: where the memory lies between the smallest and the largest peak."""
    assert len(exhaustive.found) > 12
    peaks = [peak for peak, _ in exhaustive.found.values()]
    memory = min(peaks) + share * (max(peaks) - min(peaks)) + 2
    fitting = {one: time for one, (peak, time) in exhaustive.found.items() if peak <= memory}

    choice = chosen(MODEL, devices=4, memory=memory / (1 - KEPT_FREE), device=exhaustive.device)

    best = min(fitting.values())
    assert choice.best.seconds == pytest.approx(best, rel=1e-9)
    assert exhaustive.found[choice.best.candidate][0] == round(choice.best.peak)
    others = [t for one, t in fitting.items() if one.sizes != choice.best.candidate.sizes]
    assert (choice.runner_up is None) == (not others)
    if choice.runner_up is not None:
        assert choice.runner_up.seconds == pytest.approx(min(others), rel=1e-9)


def test_nothing_fits_names_the_smallest_need(
    exhaustive: Exhaustive,
) -> None:
    from ascend_run.tools.plan.cost_text import size

    smallest = min(peak for peak, _ in exhaustive.found.values())
    search = Search(MODEL, 4, smallest * 0.99 / (1 - KEPT_FREE), exhaustive.device)
    with pytest.raises(ConfigError) as refused:
        search.choose()
    assert search.smallest == pytest.approx(smallest / (1 - KEPT_FREE), rel=1e-6)
    assert f"the smallest need found is at least {size(search.smallest)} per device" in str(
        refused.value
    )


@pytest.mark.parametrize(("states", "want"), [(("exp_avg", "exp_avg_sq"), 12), ((), 4)])
def test_the_lower_bound_has_the_states_of_the_optimizer(
    states: tuple[str, ...], want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside float32 master weights; and no layout needs less than its bound."""

    def spec(*_: object) -> OptimizerSpec:
        return OptimizerSpec(
            build=lambda groups: pytest.fail("built"),
            states={name: OptimizerState() for name in states},
            element_wise=True,
        )

    monkeypatch.setattr(choosing, "optimizer_spec", spec)
    monkeypatch.setattr(estimate, "optimizer_spec", spec)
    base = choosing._Base.of({**MODEL, "train.global_batch_size": 2}, 2)
    whole = choosing._Whole.of(base, 2, 2, DEVICE)
    assert whole.state_bytes == want
    for one in candidates(base.run.config.model, 2, 8, split_sequence=False):
        found = planned({**MODEL, "train.global_batch_size": 2}, one, 2, "ascend-910b")
        assert found is not None
        assert lower_bound_bytes(whole.counts, one, 2, whole.state_bytes) < found[0]


@pytest.mark.needs_plugins("swap-optimizer")
def test_the_lower_bound_has_no_states_that_are_off_the_device() -> None:
    values = {**MODEL, "enable": ["swap-optimizer"]}
    assert choosing._Whole.of(choosing._Base.of(values, 2), 2, 2, DEVICE).state_bytes == 0


def test_a_model_that_fits_is_data_parallel() -> None:
    assert chosen(MODEL).best.candidate.sizes == {}


def test_slow_links_lead_to_stages_and_fast_ones_to_tensor_parallelism() -> None:
    """One sequence a step on 2 devices: a pipeline has a bubble of a whole stage but sends little,
    tensor parallelism sends much and has none."""
    slow = attrs.evolve(DEVICE, node_bandwidth=1e6, latency=0.0)
    fast = attrs.evolve(DEVICE, node_bandwidth=1e15, latency=0.0)
    one = {**MODEL, "train.global_batch_size": 1}

    assert chosen(one, devices=2, device=slow).best.candidate.sizes == {"pp": 2}
    assert chosen(one, devices=2, device=fast).best.candidate.sizes == {"tp": 2}


def test_layers_divide_with_embedding_and_loss_counted_as_layers() -> None:
    """Of 6 layers and one head, with one sequence a step, only stages can use 4 devices."""
    best = chosen({**ONE_HEAD, "model.num_layers": 6}, devices=4).best.candidate
    assert best.sizes == {"pp": 4}
    assert len(best.split) == 2


@pytest.mark.needs_plugins("ring-attention", "ulysses")
def test_a_long_sequence_is_split_where_nothing_else_can_be() -> None:
    """One layer, one head and one sequence leave only the sequence; Ulysses would split heads."""
    values = {**ONE_HEAD, "model.num_layers": 1, "data.seq_length": 16384}
    best = chosen(values, devices=4).best.candidate
    assert (best.sizes, best.enable) == ({"cp": 4}, ("ring-attention",))


@pytest.mark.needs_plugins("mixtral")
def test_experts_are_split_where_they_do_not_fit() -> None:
    """Links cost nothing, and only the experts' weights are large."""
    free = attrs.evolve(DEVICE, node_bandwidth=1e18, network_bandwidth=1e18, latency=0.0)
    peak = chosen(EXPERTS, device=free).best.peak
    assert chosen(EXPERTS, device=free).best.candidate.ep == 1
    assert chosen(EXPERTS, device=free, memory=0.8 * peak).best.candidate.ep > 1


def test_less_memory_leads_to_recomputation_before_it_is_refused() -> None:
    one = {**ONE_HEAD, "model.num_layers": 1, "data.seq_length": 4096}
    peak = chosen(one, devices=1).best.peak
    ways = {chosen(one, devices=1, memory=peak * share).best.candidate.recompute
            for share in (2.0, 1.1, 1.05)}  # fmt: skip
    assert "none" in ways
    assert ways - {"none"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data.seq_length": 1024, "model.max_position_embeddings": 512}, "data.seq_length=1024"),
        ({"task": "nothing"}, "unknown plugin 'nothing'"),
    ],
)
def test_a_run_that_is_wrong_with_any_layout_has_its_own_error(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(AscendRunError, match=message):
        chosen({**MODEL, **changed})


def test_devices_without_a_layout_are_an_error_with_the_reasons() -> None:
    with pytest.raises(ConfigError, match="no layout can run") as refused:
        chosen({**ONE_HEAD, "train.global_batch_size": 7}, devices=11)
    assert any("train.global_batch_size=7" in problem for problem in refused.value.problems)
