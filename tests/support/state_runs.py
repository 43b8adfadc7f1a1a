"""Settings of runs whose optimizer states are elsewhere, and the fingerprints that runs leave."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FP32: Final[Mapping[str, Any]] = {
    "train.micro_batch_size": 2,
    "model.num_layers": 3,  # two ranges of an even number would end between parameters
    "optimizer.lr": 0.01,
    "optimizer.lr_decay_style": "constant",
    "optimizer.weight_decay": 0.5,
}
BF16: Final[Mapping[str, Any]] = {**FP32, "train.precision": "bf16"}
DISTRIBUTED: Final = {"ddp.use_distributed_optimizer": True}
OVERLAPPED: Final = {
    **DISTRIBUTED,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "ddp.bucket_size": 4000,
}
TP: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
EP: Final = {"parallel.expert_model_parallel_size": 2}
STEPS: Final = 20
SKIPPED: Final = (1, 2, 7, 13)


def fingerprints(folder: Path) -> list[str]:
    """Return the hash of all parameters after each step of the run in a folder."""
    lines = map(json.loads, (folder / "fingerprint.jsonl").read_text().splitlines())
    return [line["parameters"] for line in lines if "parameters" in line]
