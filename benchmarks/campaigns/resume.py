"""A run that was stopped goes on as the run in one piece, to the bit.

Every built-in feature, task and model family in each of fifteen layouts, with dropout: twelve
steps in one go, against two, a checkpoint, and ten more of a run that is built from it. Weights and
buffers, the optimizer's state, random generators, entries of plugins, the place in the data, and of
each step the loss, the norm of the gradient and the hash of the rows that were read. What cannot
run is listed with the reason.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

from ascend_run.plugin_api import AscendRunError
from ascend_run.registry.kinds import Kind
from ascend_run.testing.models import trial_layout
from ascend_run.types.layout import world_size

from . import features, verify_clean_newer
from .campaign import PASSED, Campaign, Outcome, digest
from .pool_of_ranks import pool
from .reach import reach_of_trial
from .tiny_runs import data_folder, prepare
from .watched_runs import Ended, differences, readings, resumed_at, watched_run

FIRST: Final = 2
LAST: Final = 12
SECONDS: Final = 200.0
"""Of one run; the first one with ``compile`` makes its code."""
LAYOUTS: Final[Sequence[tuple[str, Mapping[str, int]]]] = (
    *features.LAYOUTS,
    ("dense", {"tp": 2, "pp": 2}),
    ("moe", {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}),
)
PRECISIONS: Final[Sequence[Mapping[str, Any]]] = (
    {"train.precision": "fp32"},
    {"train.precision": "bf16"},
    {
        "train.precision": "fp16",
        "optimizer.initial_loss_scale": 8.0,
        "optimizer.loss_scale_window": 3,  # it grows after the checkpoint, by steps before it
    },
)
FAMILIES: Final = ("deepseek_v2", "gpt2")
"""Latent attention, and learned positions. Other families are options of the same layers."""
SPREAD: Final[Sequence[Mapping[str, Any]]] = (
    {"ddp.use_distributed_optimizer": True},
    {
        "ddp.use_distributed_optimizer": True,
        "ddp.overlap_grad_reduce": True,
        "ddp.overlap_param_gather": True,
    },
)
"""Where ranks share the optimizer's state among them."""
DROPOUT: Final[Sequence[Mapping[str, Any]]] = (
    {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1},
    {"model.hidden_dropout": 0.1},
    {},
)
"""The first that planning takes."""
_FILES: Final = {"folder": "."}  # for files without names
CHOICES: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    **verify_clean_newer.CHOICES,
    "adaptive-recompute": ({}, _FILES),
    "dpo": ({}, {"packing": False}, {"reference_free": True}),
    "gloo-offload": ({"slice_elements": 100}, {"check_replicas": True}),
    "lora": (
        {},
        {"dropout": 0.1},
        {"checkpoint": "full"},
        {"dora": True},
        {"modules_to_save": ["output_layer", "final_layernorm"]},
    ),
    "orm": ({}, {"packing": False}),
    "prm": ({"placeholder_token": "*"}, {"placeholder_token": "*", "packing": False}),
    "qlora": ({}, {"use_double_quant": False}, {"compute_dtype": "float32"}),
    "sft": ({}, {"packing": True}),
    "simpo": ({}, {"loss": "hinge"}),
    "swap-attention": (_FILES, {"prefetch": 0}, {"modules": ["input_layernorm", "self_attention"]}),
    "swap-optimizer": ({}, _FILES),
    "ulysses": ({}, {"kv_cache": "half"}),
    "virtual-optimizer": (_FILES, {}),
}
"""Plugin -> some of its options; one for each layout, in turn."""
CONFIG: Final[Mapping[str, Mapping[str, Any]]] = {
    **features.CONFIG,
    "deepseek_v2": {
        "model.num_query_groups": None,
        "model.q_lora_rank": 12,
        "model.kv_lora_rank": 10,
        "model.qk_head_dim": 6,
        "model.qk_pos_emb_head_dim": 4,
        "model.v_head_dim": 7,
    },
    "generate-mask": {"model.window_size": [5, 0]},  # without one there is nothing to share
    "muon": {  # it needs whole parameters
        "ddp.use_distributed_optimizer": False,
        "ddp.overlap_param_gather": False,
    },
    "dpo": {"data.seq_length": 96, "model.moe_aux_loss_coeff": 0.0},
    "orm": {"data.seq_length": 96, "model.moe_aux_loss_coeff": 0.0},
    "prm": {"data.seq_length": 64},
    "sft": {"data.seq_length": 64},
    "simpo": {"data.seq_length": 96, "model.moe_aux_loss_coeff": 0.0},
}
"""Plugin -> what the model or the data must be for it."""
EXPERTS: Final = ("deepseek_v2", "gmm")
"""They have something to do in a model with experts only."""
_BASE: Final[Mapping[str, Any]] = {
    "data.seq_length": 16,
    "train.global_batch_size": 4,
    "train.eval_interval": 0,
    "optimizer.lr_decay_iters": LAST,
}


def cases(seed: int) -> Sequence[str]:
    """JSON: plugin, layout, and what ``tiny_runs.prepare`` is asked; nothing is drawn."""
    return [
        json.dumps(_case(place, *subject), sort_keys=True)
        for subject in subjects()
        for place in range(len(LAYOUTS))
    ]


def subjects() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Plugin, task and more config: every feature, also adapters on conversations; every task; and
    the families of another attention or other positions than the others' cases have."""
    yield from ((name, "pretrain", {}) for name in features.settled())
    yield "lora", "sft", {}
    yield from ((name, name, {}) for name in features.settled(Kind.TASK))
    for family in FAMILIES:
        yield family, "pretrain", {"model.family": family}


def _case(place: int, plugin: str, task: str, more: Mapping[str, Any]) -> dict[str, Any]:
    model, layout = LAYOUTS[place]
    turn = int(digest(f"{plugin} {task}"), 16)  # of its name, so that a new plugin moves no case
    beside = (features.EXCHANGE,) if features.needs_exchange(plugin, layout) else ()
    if plugin in verify_clean_newer.BESIDE:
        beside = (*beside, verify_clean_newer.BESIDE[plugin])
    feature = () if plugin == task or "model.family" in more else (plugin,)
    values = {**_BASE, **more, **PRECISIONS[(turn + place) % len(PRECISIONS)]}
    if {"dp", "cp"} & {*layout}:
        values |= SPREAD[place % len(SPREAD)]
    for name in (task, plugin):
        values |= CONFIG.get(name, {})
        choices = CHOICES.get(name, ({},))
        # Not in step with the precisions.
        options = choices[(place + place // len(PRECISIONS)) % len(choices)]
        values |= {k: v for k, v in features.OPTIONS.items() if k.startswith(f"plugins.{name}.")}
        values |= {f"plugins.{name}.{option}": value for option, value in options.items()}
    values["model.num_layers"] = 4 if "pp" in layout else values.get("model.num_layers", 2)
    return {
        "plugin": plugin,
        "layout": layout,
        "enable": [*feature, *beside],
        "task": task,
        "model": "moe" if plugin in EXPERTS else model,
        "values": values | trial_layout(layout),
    }


def run(case: str) -> Outcome:
    """Ask whether it may run; then run it in one piece and in two."""
    asked = json.loads(case)
    plugin, layout = asked.pop("plugin"), asked.pop("layout")
    size = world_size(layout)
    for chance in DROPOUT:
        asked["values"] |= chance
        try:
            prepared = prepare(data_folder(), **asked, world_size=size)
        except AscendRunError as error:
            refused = "; ".join(error.problems or (error.headline,))
            continue
        return {
            **compare(asked, size),
            "precision": asked["values"]["train.precision"],
            "dropout": sorted(key for key, share in chance.items() if share),
            "idle": plugin in prepared.plan.idle,
        }
    return {"verdict": PASSED, "refused": refused}


def compare(asked: Mapping[str, Any], size: int) -> Outcome:
    """A run in one piece against the same run in two."""
    folder = Path(mkdtemp(dir=data_folder()))

    def made(name: str, until: int, interval: int) -> list[Ended]:
        values = {
            **asked["values"],
            "run.output_dir": str(folder / name),
            "train.train_iters": until,
            "checkpoint.save_interval": interval,
        }
        job = {**asked, "values": values}
        return pool().run(watched_run, size, data_folder(), job, timeout=SECONDS)

    try:
        whole = made("whole", LAST, 0)
        made("halves", FIRST, FIRST)
        resumed = made("halves", LAST, 0)
        problems = [*differences(whole, resumed)]
        steps, others = readings(folder / "whole"), readings(folder / "halves")
        problems += [
            f"{line} is of one run only"
            for line in (*steps, *others)
            if line not in steps or line not in others
        ]
        if (begun := resumed_at(folder / "halves")) != [FIRST]:
            problems.append(f"the run went on from the checkpoints {begun}, not from {FIRST} once")
        if len({line["loss"] for line in steps if "loss" in line}) < LAST:
            problems.append("the loss stands still, so the steps show nothing")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if problems:
        return {"verdict": "differs", "why": "; ".join(problems[:3]), "all": problems}
    return {"verdict": PASSED}


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    """How much was compared, of which plugins in which precisions, and what was refused."""
    compared: dict[str, Counter[str]] = {}
    refused: Counter[str] = Counter()
    for case, outcome in outcomes.items():
        if "refused" in outcome:
            refused[outcome["refused"]] += 1
        elif "precision" in outcome:
            compared.setdefault(json.loads(case)["plugin"], Counter())[outcome["precision"]] += 1
    done = [outcome for outcome in outcomes.values() if "precision" in outcome]
    return {
        "compared": len(done),
        "with dropout": sum(bool(outcome["dropout"]) for outcome in done),
        "of an idle plugin": sum(outcome["idle"] for outcome in done),
        "cases of each plugin": {name: dict(sorted(n.items())) for name, n in compared.items()},
        "refused": dict(sorted(refused.items())),
    }


def reach(case: str) -> str:
    """Return the hash of all that a case can reach."""
    asked = json.loads(case)
    family = asked["values"].get("model.family")
    names = (*asked["enable"], asked["task"], *([family] if family else []))
    return reach_of_trial(names, asked["model"])  # a case has its options in it


CAMPAIGN = Campaign(name="resume", seed=0, cases=cases, run=run, figures=figures, reach=reach)
