"""Sizes of buffers: by the corrected formulas, and never smaller than what ranks exchange."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.hooks import Hooks
from ascend_run.entrypoints.cli import run as command_line
from ascend_run.plugin_api import Communication, ConfigError, Layout
from ascend_run.plugins.communication.comm_buffer_auto import SMALL_MB, largest_messages
from ascend_run.plugins.platforms.cpu.device import CpuDevice
from ascend_run.testing.models import MODELS
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from ascend_run.tools.plan.costs import cost_data
from tests.support.communication import AXES, OPERATIONS, RANKS
from tests.support.costs import planned
from tests.support.needed_plugins import case

NAME = "comm-buffer-auto"
S, B, H, N, G, K = 8192, 2, 4096, 32, 8, 2
TP = {"parallel.tensor_model_parallel_size": 4}
SP = {**TP, "parallel.sequence_parallel": True}
PP = {"parallel.pipeline_model_parallel_size": 2}
CP = {"parallel.context_parallel_size": 2}
EP = {"parallel.expert_model_parallel_size": 2}
WHOLE = {"parallel.expert_tensor_parallel_size": 1}
LARGE: Mapping[str, Any] = {
    "model.family": "llama",
    "model.num_layers": 4,
    "model.hidden_size": H,
    "model.ffn_hidden_size": 11008,
    "model.num_attention_heads": N,
    "model.num_query_groups": G,
    "model.vocab_size": 32000,
    "data.seq_length": S,
    "train.micro_batch_size": B,
    "train.global_batch_size": 64,
    "train.precision": "bf16",
}
EXPERTS: Mapping[str, Any] = {
    "model.family": "mixtral",
    "model.num_moe_experts": 8,
    "model.moe_router_topk": K,
    "model.moe_ffn_hidden_size": 2048,
}


def sizes(config: Mapping[str, Any], plugins: tuple[str, ...] = ()) -> dict[str, int]:
    """Return process group -> MiB of a large run on 16 ranks."""
    values = {**LARGE, f"plugins.{NAME}.max_mb": 10_000, **config}
    prepared, _ = planned(values, (NAME, *plugins), world_size=16)
    cost = cost_data(prepared.config, prepared.layout, Hooks(prepared.instances()))
    return {group.group: group.buffer_mb for group in cost.groups or ()}


def mb(mega_elements: float) -> int:
    """Two bytes of every 2**20 elements begun."""
    return 2 * math.ceil(mega_elements)


def hidden(cp: int = 1) -> float:
    """Elements of a hidden state, over 2**20."""
    return S / cp * B * H / 2**20


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**TP, **PP}, {"tp": 2 * mb(hidden()), "pp": mb(hidden())}),
        ({**SP, **PP}, {"tp": mb(hidden()), "pp": mb(hidden() / 4)}),
        ({**SP, "data.seq_length": 8000}, {"tp": mb(8000 * B * H / 2**20)}),  # 62.5: rounded up
        ({**SP, **EP, **WHOLE, **EXPERTS}, {"ep": mb(2.0 * K * hidden() / 4)}),
        (
            {**SP, **EP, **WHOLE, **EXPERTS, f"plugins.{NAME}.expert_imbalance": 1.3},
            {"ep": mb(1.3 * K * hidden() / 4)},
        ),
        (
            {**SP, **EP, **WHOLE, **EXPERTS, "model.moe_token_dispatcher_type": "allgather"},
            {"tp_ep": mb(2 * hidden() / 4 * 2)},
        ),
    ],
    ids=["tp", "sequence parallel", "rounded", "experts", "imbalance", "all-gather"],
)
def test_sizes_follow_the_formulas(config: Mapping[str, Any], expected: dict[str, int]) -> None:
    found = sizes(config)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("groups", [G, N], ids=["grouped queries", "as many keys"])
@pytest.mark.parametrize(
    ("plugins", "of_heads"),
    [
        case(("ulysses",), lambda keys: 1 + 2 * keys),
        case(("ring-attention",), lambda keys: 2 * 2 * keys),  # gradients of both in float32
    ],
    ids=["ulysses", "ring-attention"],
)
def test_sizes_of_context_parallel_groups_have_all_heads(
    plugins: tuple[str, ...], of_heads: Any, groups: int
) -> None:
    found = sizes({**SP, **CP, "model.num_query_groups": groups}, plugins)
    assert found["cp"] == mb(hidden(cp=2) / 4 * of_heads(groups / N))


def test_what_arrives_of_an_all_gather_counts() -> None:
    sent = Communication(operation="all_gather", group="tp", calls=2, sent_bytes=6e6, why="x")
    found = largest_messages(Layout(world_size=4, tp=4), [sent], imbalance=3.0)
    assert {name: message.nbytes for name, message in found.items()} == {"tp": 12e6}


def test_gradients_keep_the_default_and_few_numbers_are_small() -> None:
    tied = {"model.share_embeddings_and_output_weights": True}
    found = sizes({**SP, **PP, **EP, **WHOLE, **EXPERTS, **tied})
    assert not {"dp", "dp_cp", "expt_dp", "embd", "pos_embd"} & found.keys()
    assert {found[name] for name in ("mp", "tp_cp", "tp_dp_cp", "tp_ep_pp")} == {SMALL_MB}


def test_no_computed_size_exceeds_the_largest() -> None:
    values = {**LARGE, **TP, f"plugins.{NAME}.max_mb": 200}
    prepared, _ = planned(values, (NAME,), world_size=16)
    groups = cost_data(prepared.config, prepared.layout, Hooks(prepared.instances())).groups
    found = {group.group: group for group in groups or ()}
    assert 2 * mb(hidden()) > found["tp"].buffer_mb == 200
    assert "in slices of at most 200 MiB" in found["tp"].why
    assert (
        sizes({**TP, f"plugins.{NAME}.max_mb": 200, f"plugins.{NAME}.sizes": {"tp": 300}})["tp"]
        == 300
    )


def test_sizes_of_the_user_win() -> None:
    given = {f"plugins.{NAME}.sizes": {"tp": 64, "dp_cp": 300, "mp": 1}}
    plain, found = sizes(SP), sizes({**SP, **given})
    assert found == {**plain, "tp": 64, "dp_cp": 300, "mp": 1} != plain


def test_unknown_groups_are_refused_in_one_message() -> None:
    with pytest.raises(ConfigError) as error:
        sizes({**SP, f"plugins.{NAME}.sizes": {"exp": 64, "tp": 1, "dp_modulo_exp": 64}})
    assert list(error.value.problems) == [
        f"'{NAME}' sets those of '{name}'; expected one of: cp, dp, dp_cp, embd, ep, expt_dp, "
        "expt_tp, mp, pos_embd, pp, tp, tp_cp, tp_dp_cp, tp_ep, tp_ep_pp"
        for name in ("exp", "dp_modulo_exp")
    ]


@pytest.mark.needs_plugins("hybrid-cp")
def test_groups_of_plugins_have_sizes_too() -> None:
    four = {"parallel.context_parallel_size": 4, "plugins.hybrid-cp.ulysses_degree": 2}
    found = sizes({**TP, **four, f"plugins.{NAME}.sizes": {"hybrid_cp_window": 7}}, ("hybrid-cp",))
    assert found["hybrid_cp_window"] == 7
    assert found["hybrid_cp_heads"] == mb(hidden(cp=4) / 4 * (1 + 2 * G / N))


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sizes has tp=0; a buffer takes at least 1 MiB"):
        sizes({f"plugins.{NAME}.sizes": {"tp": 0}})


SMALL_TP = {"parallel.tensor_model_parallel_size": 2}
SMALL_SP = {**SMALL_TP, "parallel.sequence_parallel": True}


@pytest.mark.exhaustive(by=lambda plugins, model: [model, bool(plugins)])
@pytest.mark.parametrize(
    ("plugins", "model", "values"),
    [
        ((), "dense", {**SMALL_TP, **PP}),
        ((), "dense", {**SMALL_SP, "model.mtp_num_layers": 1}),
        case(("ulysses",), "dense", {**CP, **SMALL_TP}),
        case(("ring-attention",), "dense", {**CP, **SMALL_SP}),
        ((), "moe", {**EP, **SMALL_SP, **WHOLE}),
        ((), "moe", {**EP, **SMALL_SP, "model.moe_token_dispatcher_type": "allgather"}),
    ],
    ids=["tp-pp", "sequence-mtp", "ulysses", "ring", "all-to-all", "all-gather"],
)
def test_no_message_of_a_step_exceeds_the_computed_one(
    gloo_pool: GlooPool, plugins: tuple[str, ...], model: str, values: Mapping[str, Any]
) -> None:
    config = {**MODELS[model], "data.seq_length": 64, **values}
    prepared, costs = planned(config, plugins, world_size=RANKS)
    layout = prepared.layout
    sent = [message for cost in costs for message in cost.communication]
    found = largest_messages(layout, sent, imbalance=2.0)
    computed = {name: message.times * message.nbytes for name, message in found.items()}
    outcomes = gloo_pool.run(run_trial, RANKS, Trial(plugins=plugins, config=config, steps=1))
    seen = {
        name: max(largest(layout, name, n, one.collective_calls) for n, one in enumerate(outcomes))
        for name in AXES
        if name not in ("dp", "dp_cp", "expt_dp")
    }
    times = 2.0 if model == "moe" else 1.0  # the largest may be one that depends on the routing
    exchanging = [name for name in seen if seen[name] and name in computed]
    assert exchanging
    assert all(computed[name] <= times * seen[name] for name in exchanging)
    for name, nbytes in seen.items():
        assert nbytes <= max((computed[n] for n in same(layout, name, computed)), default=0)


def same(layout: Layout, name: str, names: Mapping[str, Any]) -> list[str]:
    """Return the names of groups of the same ranks."""
    return [other for other in names if members(layout, other, 0) == members(layout, name, 0)]


def members(layout: Layout, name: str, rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in layout.groups(*AXES[name]) if rank in ranks)


def largest(layout: Layout, name: str, rank: int, calls: Any) -> int:
    """Return the bytes of a rank's largest message to a group, of more than a few numbers."""
    ranks = members(layout, name, rank)
    found = [0]
    for call in calls:
        operation = OPERATIONS.get(call.operation)
        is_its = call.ranks == ranks
        if operation == "send":  # over a group of all ranks
            is_its = name == ("pp" if layout.pp > 1 else "cp")
        elif name == "cp":  # gradients are reduced over the same ranks
            is_its &= operation != "all_reduce"
        if operation is not None and is_its and len(ranks) > 1 and call.nbytes > 64:
            times = {"all_gather": len(ranks), "all_reduce": 2}.get(operation, 1)
            found.append(times * call.nbytes)
    return max(found)


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:megatron\.")
def test_a_training_run_hands_the_sizes_to_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.tokens import write_tokens

    seen: list[int] = []
    monkeypatch.setattr(
        CpuDevice, "group_options", lambda self, options: seen.append(options.buffer_mb)
    )
    words = [
        "train",
        f"data.train={write_tokens(tmp_path)}",
        f"run.output_dir={tmp_path / 'run'}",
        "model.family=llama",
        "model.num_layers=1",
        "model.hidden_size=16",
        "model.num_attention_heads=2",
        "model.vocab_size=90",
        "data.seq_length=16",
        "train.train_iters=1",
        "train.precision=fp32",
        f"plugins.{NAME}.sizes={{tp = 64}}",
    ]
    assert command_line([*words, "--enable", NAME]) == 0
    assert seen == [64]
    groups = json.loads((tmp_path / "run/plan.json").read_text())["cost"]["groups"]
    assert groups == [{"group": "tp", "buffer_mb": 64, "why": f"plugins.{NAME}.sizes"}]


def test_plan_shows_the_sizes_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{key}={value}" for key, value in {**LARGE, **TP}.items()]
    words += ["parallel.sequence_parallel=true", "data.train=x", "run.nproc=4"]
    assert command_line(["plan", *words, "--enable", NAME]) == 0
    rows = [line.strip().split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert ["tp", "128", "MiB", "all_gather of 128.00 MiB: attention, forward"] in rows
