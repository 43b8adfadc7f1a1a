"""Run folders as a run leaves them: a small mixture-of-experts model on two ranks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START = 1_760_000_000.0

CONFIG = """\
enable = ["ulysses", "gmm", "swap-attention"]  # command line
platform = "cpu"  # default
task = "pretrain"  # default

[run]
output_dir = "runs/demo"  # demo.toml:3
seed = 1234  # default

[model]
family = "mixtral"  # demo.toml:6
num_layers = 6  # demo.toml:7
hidden_size = 256  # demo.toml:8
num_attention_heads = 8  # demo.toml:9
num_query_groups = 4  # demo.toml:10
num_moe_experts = 8  # demo.toml:11
moe_router_topk = 2  # demo.toml:12
moe_aux_loss_coeff = 0.01  # demo.toml:13
ffn_hidden_size = 704  # demo.toml:14
normalization = "RMSNorm"  # family mixtral
add_bias_linear = false  # family mixtral
layernorm_epsilon = 1e-05  # family mixtral
attention_dropout = 0.0  # family mixtral
init_method_std = 0.02  # Megatron's default

[parallel]
context_parallel_size = 2  # demo.toml:17
expert_model_parallel_size = 2  # demo.toml:18
tensor_model_parallel_size = 1  # Megatron's default
pipeline_model_parallel_size = 1  # Megatron's default

[data]
train = ["data/train # 1"]  # demo.toml:21
validation = ["data/held-out"]  # demo.toml:22
seq_length = 512  # demo.toml:23

[train]
train_iters = 400  # train.train_iters=400 on the command line
micro_batch_size = 2  # demo.toml:27
global_batch_size = 8  # demo.toml:28
precision = "bf16"  # default
eval_interval = 50  # demo.toml:30

[optimizer]
lr = 0.002  # demo.toml:33
min_lr = 0.0002  # demo.toml:34
lr_warmup_iters = 40  # demo.toml:35
clip_grad = 1.0  # default

[plugins.swap-attention]
keep_layers = 1  # plugin default
"""

_PLUGINS = (
    ("mixtral", "the Mixtral family: its config keys and tensors", "model", ["model-family"]),
    ("pretrain", "next-token training on token files", "model", ["task"]),
    (
        "ulysses",
        "split heads, not the sequence, inside attention",
        "rounding",
        ["context-parallel"],
    ),
    ("gmm", "compute all local experts in one grouped product", "rounding", ["experts"]),
    ("swap-attention", "keep what attention saves on the host", "bitwise", ["saved-activations"]),
    ("cpu", "train on the CPU, with gloo between the ranks", "rounding", ["platform"]),
)

_KINDS = {"mixtral": "model family", "pretrain": "task", "cpu": "platform"}

_HOOKS = (
    ("ascend_device", "provider", ["cpu"], "cpu: the platform's default"),
    ("ascend_model_family", "provider", ["mixtral"], "mixtral: claims model-family"),
    ("ascend_task", "provider", ["pretrain"], "pretrain: claims task"),
    ("ascend_platform_ops", "provider", ["cpu"], "cpu: the platform's default"),
    ("ascend_attention_kernel", "provider", ["cpu"], "cpu: the platform's default"),
    (
        "ascend_attention",
        "wrapper",
        ["ulysses", "swap-attention"],
        "innermost first; swap-attention is declared to be after ulysses",
    ),
    ("ascend_sequence_partition", "provider", ["ulysses"], "ulysses: claims context-parallel"),
    ("ascend_experts", "provider", ["gmm"], "gmm: claims experts"),
    ("ascend_process_groups", "contribution", ["ulysses"], "the only implementation"),
    ("ascend_environment", "contribution", ["cpu"], "the only implementation"),
    ("ascend_checkpoint_entries", "contribution", ["swap-attention"], "the only implementation"),
    ("ascend_report", "contribution", ["swap-attention"], "the only implementation"),
    ("ascend_after_step", "listener", ["swap-attention"], "the only implementation"),
)

PLAN: dict[str, Any] = {
    "plugins": [
        {
            "name": name,
            "kind": _KINDS.get(name, "feature"),
            "version": "0.1.0",
            "distribution": "ascend-run",
            "summary": summary,
            "numerics": numerics,
            "claims": claims,
            "hooks": [hook for hook, _, owners, _ in _HOOKS if name in owners],
            "why": "named with --enable",
        }
        for name, summary, numerics, claims in _PLUGINS
    ],
    "hooks": [
        {"hook": hook, "kind": kind, "owners": owners, "why": why}
        for hook, kind, owners, why in _HOOKS
    ],
    "layout": {
        "world_size": 2,
        "axes": {"tp": 1, "cp": 2, "dp": 1, "pp": 1},
        "expert_axes": {"expt_tp": 1, "ep": 2, "expt_dp": 1, "pp": 1},
        "groups": {"tp": [[0], [1]], "cp": [[0, 1]], "dp": [[0], [1]], "ep": [[0, 1]]},
    },
    "ranks": [{"rank": r, "tp": 0, "cp": r, "dp": 0, "pp": 0, "ep": r} for r in range(2)],
    "idle": {},
    "environment": {"OMP_NUM_THREADS": "1"},
    "patching": [],
    "device": "cpu",
    "versions": {
        "ascend-run": "0.1.0",
        "python": "3.11.2",
        "torch": "2.13.0",
        "megatron-core": "0.16.1",
    },
    "panels": [
        {
            "title": "Swapped to the host",
            "metrics": ["swap-attention/host_bytes"],
            "unit": "bytes",
        }
    ],
}

LOG = (
    {"time": START, "level": "info", "rank": 0, "event": "run.start", "world_size": 2},
    {
        "time": START + 3,
        "level": "warning",
        "rank": 0,
        "event": "python.warning",
        "message": "Transformer Engine is not installed",
        "source": "megatron.core",
    },
    {
        "time": START + 90,
        "level": "warning",
        "rank": 1,
        "event": "data.epoch",
        "dataset": "data/train",
        "epoch": 2,
    },
)


def readings(step: int, random_state: random.Random, total: int = 400) -> dict[str, Any]:
    """What a step of such a run logs."""
    progress = step / total
    warm = min(1.0, step / (0.1 * total))
    lr = 0.0002 + 0.0018 * 0.5 * (1 + math.cos(math.pi * progress)) if warm == 1 else 0.002 * warm
    loss = 3.9 + 4.42 * math.exp(-step / (0.16 * total)) + random_state.gauss(0, 0.09)
    skew = [1 + 0.9 * math.exp(-6 * progress) * math.sin(1.7 * e + 1) for e in range(8)]
    skew = [max(0.05, s + random_state.gauss(0, 0.06)) for s in skew]
    seconds = 0.53 + random_state.expovariate(22)
    return {
        "step": step,
        "loss": loss,
        "lr": lr,
        "grad_norm": 0.6 + 3.2 * math.exp(-step / (0.07 * total)) + random_state.expovariate(7),
        "tokens_per_second": 4096 / seconds,
        "step_seconds": seconds,
        "memory_bytes": 810_000_000 + int(40e6 * math.sin(step / 9)),
        "memory_peak_bytes": 1_390_000_000 + min(step, 60) * 1_500_000,
        "consumed_samples": 8 * step,
        "expert_load": [share / sum(skew) for share in skew],
        "expert_load_by_layer": [[], *[[share / sum(skew) for share in skew]] * 3],
        "aux_loss": 1.02 + 0.4 * math.exp(-8 * progress) + random_state.gauss(0, 0.006),
        "swap-attention/host_bytes": 96_000_000 + int(4e6 * math.sin(step / 20)),
    }


def metrics_lines(steps: int = 400, resume_at: int | None = 300, seed: int = 7) -> list[Any]:
    """A run of so many steps that was resumed on its way, with an evaluation every 50 steps."""
    state = random.Random(seed)
    clock = START
    lines: list[Any] = [{"event": "start", "time": clock}]
    lines.append({"step": 0, "eval_loss": 8.3242, "time": clock})
    for step in range(1, steps + 1):
        line = readings(step, state, steps)
        clock += line["step_seconds"]
        lines.append({**line, "time": round(clock, 3)})
        if step % 50 == 0:
            held_out = 3.97 + 4.35 * math.exp(-step / (0.16 * steps)) + state.gauss(0, 0.015)
            lines.append({"step": step, "eval_loss": held_out, "time": round(clock, 3)})
        if step == resume_at:
            clock += 20
            lines.append({"event": "resume", "step": step, "time": round(clock, 3)})
    lines.append({"event": "finish", "time": round(clock, 3)})
    return lines


def write_run(
    folder: Path,
    *,
    lines: Sequence[Any] | None = None,
    config: str = CONFIG,
    plan: Any = None,
    log: Sequence[Any] = LOG,
) -> Path:
    """A whole run folder; the folder, for what comes next."""
    folder.mkdir(parents=True)
    plan = PLAN if plan is None else plan
    (folder / "config.toml").write_text(config)
    (folder / "plan.json").write_text(json.dumps(plan))
    lock = {name: {"distribution": "ascend-run", "version": "0.1.0"} for name, *_ in _PLUGINS}
    (folder / "plugins.lock.json").write_text(json.dumps(lock))
    lines = metrics_lines() if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in log))
    return folder
