"""The config file of a preset's run, with the chosen layout and its estimate as comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from ascend_run.tools.plan.cost_text import seconds, size

from .choosing import KEPT_FREE, Choice, Estimate
from .presets import Preset

_TOP: tuple[str, ...] = ("enable", "platform", "task")


def run_toml(
    preset: Preset,
    values: Mapping[str, Any],
    choice: Choice,
    *,
    devices: int,
    memory: float,
    device: str,
    file: str,
) -> str:
    """Return the text of the file.

    Args:
        values: Every value of the run by full key.
        memory: Memory of a device. Unit: bytes.
        device: Name of the device that the time is of.
        file: Name of the file, for the commands in its comments.
    """
    lines = [*_comments(preset, values, choice, devices, memory, device, file)]
    head = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return f"{head}\n{toml(values)}"


def toml(values: Mapping[str, Any]) -> str:
    """Return values by full key, such as ``model.num_layers``, as a TOML document."""
    document: dict[str, Any] = {key: values[key] for key in _TOP if key in values}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        table = document
        for part in section.split(".") if section else ():
            table = table.setdefault(part, {})
        table[name] = [*value] if isinstance(value, tuple) else value
    return tomli_w.dumps(document)


def _comments(
    preset: Preset,
    values: Mapping[str, Any],
    choice: Choice,
    devices: int,
    memory: float,
    device: str,
    file: str,
) -> Iterator[str]:
    nodes = devices // values["run.nproc"]
    yield f"{preset.name}: {preset.parameters:,} parameters; numbers of {preset.source}."
    if preset.note:
        yield preset.note
    yield ""
    yield f"Layout for {devices} devices of {size(memory)}, of which {KEPT_FREE:.0%} are kept free,"
    yield f"chosen by the cost model of ascend-run plan; times are of {device}."
    yield f"    chosen:    {_summary(choice.best, devices)}"
    if choice.runner_up is not None:
        yield f"    runner-up: {_summary(choice.runner_up, devices)}"
    yield ""
    yield "data.train stands for your dataset; also set train.train_iters and [optimizer]."
    world, several = "", ""
    if nodes > 1:
        world = f" --world {devices}"
        several = f" --nnodes {nodes} --rdzv-endpoint HOST:29400 --rdzv-key-file FILE"
    yield f"    ascend-run plan --config {file}{world} --device {device}"
    yield f"    ascend-run --config {file}{several}"
    yield "To start from published weights, add model.hf_path=FOLDER."


def _summary(estimate: Estimate, devices: int) -> str:
    layout = estimate.candidate.text(devices)
    return f"{layout}: {size(estimate.peak)} at the peak, {seconds(estimate.seconds)} a step"
