"""Runs on pipeline stages and with a distributed optimizer, cut in two: the same bits; and a run
that goes on in another layout than it began in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool

from .runs import Runs, assert_same
from .test_distributed_optimizer import OVERLAPPED, TIED
from .trials import CP, ETP, EXCHANGE, PP, TP, VPP

FIRST, NEXT = 3, 10
_FOUR = {"model.num_layers": 4}
_DROPOUT = {"model.attention_dropout": 0.1, "model.hidden_dropout": 0.1}
_EXPERTS_LAST = {**MOE, **_FOUR, "model.moe_layer_freq": [0, 0, 1, 1]}
KINDS = {
    "tied pp, mtp": ({**DENSE, **_FOUR, **TIED, **PP, "model.mtp_num_layers": 2}, 2, ()),
    "bf16 vpp, all overlapped": (
        {**DENSE, **_FOUR, **TIED, **VPP, **OVERLAPPED, "train.precision": "bf16"},
        4,
        (),
    ),
    "tp cp, cut experts, overlapped": (
        {**MOE, **TP, **ETP, **(CP if EXCHANGE else {}), **OVERLAPPED},
        4,
        EXCHANGE,
    ),
}


@pytest.mark.exhaustive(by=lambda kind: [])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_resumes_bitwise(gloo_pool: GlooPool, tmp_path: Path, kind: str) -> None:
    """Weights, optimizer, random generators, position in the data, and ten losses."""
    values, world_size, plugins = KINDS[kind]
    runs = Runs(gloo_pool, tmp_path, ({**values, **_DROPOUT}, world_size, plugins))
    runs.data |= {"train.train_iters": FIRST + NEXT, "optimizer.lr_decay_iters": FIRST + NEXT}
    straight = runs("straight")
    runs("halves", train__train_iters=FIRST, checkpoint__save_interval=FIRST)
    # Evaluations and checkpoints between the steps change nothing.
    halves = runs("halves", checkpoint__save_interval=4, train__eval_interval=5)
    assert_same(halves, straight)
    losses = [line for line in halves[0].readings if "loss" in line]
    assert losses == straight[0].readings
    assert len({line["loss"] for line in losses}) == FIRST + NEXT


def _flat(line: dict[str, Any]) -> dict[str, float]:
    loads = {f"load {index}": load for index, load in enumerate(line.get("expert_load", ()))}
    lists = ("expert_load", "expert_load_by_layer")
    return {**{key: value for key, value in line.items() if key not in lists}, **loads}


MOVED = {
    **{name: KINDS[name] for name in ("tied pp, mtp", "tp cp, cut experts, overlapped")},
    "tp 4, shared key-value heads": (
        {**DENSE, **TP, "parallel.tensor_model_parallel_size": 4, "model.qk_layernorm": True},
        4,
        (),
    ),
}


@pytest.mark.exhaustive(by=lambda back: [])
@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize("back", [False, True], ids=["to one rank", "from one rank"])
def test_a_run_resumes_in_another_layout(
    gloo_pool: GlooPool, tmp_path: Path, kind: str, back: bool
) -> None:
    values, world_size, plugins = MOVED[kind]
    alone = {
        key: value for key, value in values.items() if not key.startswith(("parallel.", "ddp."))
    }
    layouts = [(values, world_size, plugins), (alone, 1, ())]
    begun, ended = reversed(layouts) if back else layouts
    runs = Runs(gloo_pool, tmp_path, (alone, 1, ()))
    straight = runs("straight")
    for (runs.values, runs.world_size, runs.plugins), steps in ((begun, 3), (ended, 6)):
        moved = runs("moved", train__train_iters=steps, checkpoint__save_interval=3)
    for line, expected in zip(moved[0].readings, straight[0].readings, strict=True):
        # The experts' load and their loss are of all stages too.
        assert _flat(line) == pytest.approx(_flat(expected), rel=1e-5)
    for name, weight in straight[0].tensors.items():
        if name.startswith("model/") and name in moved[0].tensors:
            held = moved[0].tensors[name]
            begin = tuple(slice(length) for length in held.shape)  # of a part, the first rank's
            torch.testing.assert_close(held, weight[begin], rtol=1e-5, atol=1e-6)
