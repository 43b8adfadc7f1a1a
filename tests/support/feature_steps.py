"""Steps of a task that trains on pairs, with features beside it, as jobs for the pool."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.testing.models import trial_layout
from ascend_run.testing.pool import GlooPool
from ascend_run.types.layout import world_size
from benchmarks.campaigns import resume, verify_clean_newer
from benchmarks.campaigns.features import EXCHANGE, OPTIONS, config_of, features, numerics_of
from benchmarks.campaigns.tiny_runs import data_folder, prepare
from benchmarks.campaigns.watched_runs import readings, watched_run

from .needed_plugins import names_of

LAYOUTS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "one rank": ("dense", {}),
    "vpp=2": ("dense", {"pp": 2, "vpp": 2}),
    "ep=2": ("moe", {"dp": 2, "ep": 2}),
    "cp=2": ("dense", {"cp": 2}),
}
WHERE = names_of(LAYOUTS, lambda run: [EXCHANGE] if "cp" in run[1] else [])
"""Their names, as parameters of a test."""
OPTIONS_HERE = {**OPTIONS, "plugins.virtual-optimizer.folder": "."}
"""On the CPU its states go to files, which have no names and so need no folder of their own."""
SAME: Mapping[Numerics, float] = {Numerics.BITWISE: 0.0, Numerics.ROUNDING: 1e-4}
"""How a feature may change a step, relative."""
REFUSED: Mapping[str, Collection[str]] = {
    "fused-mlp": ["ep=2"],  # where every MLP is of experts
    "moe-tp-extend-ep": ["ep=2"],
    "recompute-activation": ["ep=2"],
}
"""Feature -> where planning refuses it, as its own suite tests."""
Steps = Callable[[tuple[str, ...], str, Mapping[str, Any]], list[float] | None]


def feature_steps(gloo_pool: GlooPool, task: str) -> Steps:
    """Return what gives the losses and gradient norms of four steps; None if a run is refused."""

    @cache
    def run(names: tuple[str, ...], where: str, more: str) -> list[float] | None:
        model, layout = LAYOUTS[where]
        out = Path(mkdtemp(dir=data_folder()))
        values = {
            "run.output_dir": str(out),
            "model.num_layers": 4,
            "model.moe_aux_loss_coeff": 0.0,
            "data.seq_length": 96,
            "train.train_iters": 4,
            "train.global_batch_size": 4,
            "train.eval_interval": 0,
            "checkpoint.save_interval": 0,
            f"plugins.{task}.packing": False,
            **{key: v for key, v in OPTIONS_HERE.items() if key.split(".")[1] in names},
            **trial_layout(layout),
            **json.loads(more),
        }
        asked = {"enable": [*names], "task": task, "model": model, "values": values}
        size = world_size(layout)
        try:
            prepare(data_folder(), **asked, world_size=size)
        except AscendRunError:
            return None
        gloo_pool.run(watched_run, size, data_folder(), asked, timeout=100)
        lines = [line for line in readings(out) if line.get("grad_norm") is not None]
        return [line[name] for line in lines for name in ("loss", "grad_norm")]

    return lambda names, where, more: run(names, where, json.dumps(more))


SLOW = "compile"
"""It makes code for each of these runs, in minutes; its own suite compares it with plain layers."""
COMPARED = [name for name in features() if numerics_of(name) in SAME and name != SLOW]


def assert_leaves_the_steps(steps: Steps, name: str, where: str) -> None:
    """Compare the steps with a feature with those without it."""
    exchange = (EXCHANGE,) if where == "cp=2" else ()
    beside = tuple(filter(None, [verify_clean_newer.BESIDE.get(name)]))
    settings = {**config_of((name,)), **resume.CONFIG.get(name, {}), "data.seq_length": 96}
    names = tuple(dict.fromkeys((name, *beside, *exchange)))
    found = steps(names, where, settings)
    if found is None and exchange:  # it exchanges the sequence itself
        found = steps((name, *beside), where, settings)
    assert (found is None) == (where in REFUSED.get(name, ()))
    if found is None:
        return
    wanted = steps((*beside, *exchange), where, settings)
    assert wanted is not None
    assert len(wanted) >= 8
    assert found == pytest.approx(wanted, rel=SAME[numerics_of(name)], abs=0.0)
