"""A run of seconds, for the workers that time parts of a true one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from benchmarks.tiny_data import make_tiny_data

STEPS: Final = 3
_CONFIG: Final = f"""
[model]
num_layers = 1
hidden_size = 32
num_attention_heads = 2
vocab_size = 300
[data]
train = ["data/train"]
tokenizer = "data/tokenizer.json"
seq_length = 32
[train]
train_iters = {STEPS}
global_batch_size = 2
precision = "fp32"
log_interval = 1
[checkpoint]
save_interval = 0
"""


def tiny_run(folder: Path) -> list[str | Path]:
    """Write its file and data to a folder; return the arguments of a worker."""
    prefix = make_tiny_data(folder, [sys.executable, "-m", "ascend_run"])
    file = folder / "run.toml"
    file.write_text(_CONFIG)
    data = [f"data.train={prefix}", f"data.tokenizer={prefix.parent / 'tokenizer.json'}"]
    return ["--config", file, *data, f"run.output_dir={folder / 'run'}"]
