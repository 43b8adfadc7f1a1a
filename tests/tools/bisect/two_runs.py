"""Run folders without the runs: what ``bisect`` reads of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascend_run.core.fingerprint.record import FILE_NAME
from ascend_run.prepare.config.printing import render_toml
from ascend_run.prepare.config.raw import RawConfig, RawValue
from ascend_run.prepare.plan.json_values import plan_text
from ascend_run.prepare.prepare import prepare_raw
from ascend_run.testing.models import DENSE
from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.text.indexed import IndexedWriter, dtype_for
from ascend_run.tools.bisect.mixing import Mixing
from ascend_run.tools.bisect.recorded_runs import read_runs

Values = Mapping[str, Any]


def write_run(
    folder: Path, values: Values | None = None, enable: Sequence[str] = (), world_size: int = 1
) -> Path:
    """Write the config, the plan and the lock of a tiny run.

    Args:
        values: On top of ``DENSE``.
    """
    given = {"data.train": ["tokens"], **DENSE, **(values or {}), "enable": [*enable]}
    raw = RawConfig(values={key: RawValue(value, "the test") for key, value in given.items()})
    prepared = prepare_raw(raw, world_size)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(render_toml(prepared.resolved))
    (folder / "plan.json").write_text(plan_text(prepared.plan))
    (folder / "plugins.lock.json").write_text(json.dumps(prepared.lock))
    return folder


def write_fingerprints(folder: Path, losses: Sequence[float]) -> None:
    """Write one entry a step, from step 1; only the losses may differ between runs."""
    lines: list[Values] = [{"event": "start", "format": 1}]
    for step, loss in enumerate(losses, 1):
        hashes = dict.fromkeys(("fingerprint", "parameters", "batch"), f"{step:016x}")
        line = {"step": step, "loss": loss, "grad_norm": 0.5, "consumed_samples": 4 * step}
        lines.append({**hashes, **line})
    (folder / FILE_NAME).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def write_tokens(folder: Path) -> str:
    """Write a small dataset; return its prefix."""
    prefix = str(folder / "tokens")
    with bin_path(prefix).open("wb") as stream:
        writer = IndexedWriter(stream, dtype_for(90))
        for document in range(40):
            writer.add([(7 * document + 3 * place) % 90 for place in range(20)])
    idx_path(prefix).write_bytes(writer.index())
    return prefix


def mixing_of(one: Path, other: Path, steps: int = 2) -> Mixing:
    return Mixing(*read_runs((one, other)), steps)
