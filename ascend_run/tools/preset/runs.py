"""The run of a preset: the config that its model defines, and the runs that a layout makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.contracts import ModelFamily
from ascend_run.prepare.config.raw import RawConfig, RawValue
from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from ascend_run.registry.discovery import discover

from .presets import Preset

DATASET: Final = "data/train"
"""Stands for the dataset, which a user names."""


@attrs.frozen(kw_only=True)
class Request:
    """What a user asks of a preset's run."""

    preset: Preset
    devices: int
    """Devices of all nodes."""
    platform: str = "npu"
    task: str = "pretrain"
    seq_length: int | None = None
    """None: the preset's. Unit: tokens."""
    global_batch_size: int | None = None
    """None: the first multiple of ``devices`` that is at least 256. Unit: sequences."""
    train: tuple[str, ...] = ()
    """``data.train``; empty: a name that stands for it."""
    tokenizer: str | None = None


def family_of(preset: Preset) -> ModelFamily:
    """Return the record of a preset's model family.

    Raises:
        AscendRunError: The family's plugin cannot be loaded.
    """
    plugin: Any = discover().load([preset.family])[preset.family]
    family: ModelFamily = Hooks([plugin()]).require("ascend_model_family")
    return family


def model_values(preset: Preset) -> dict[str, Any]:
    """Return the ``[model]`` values of a preset, by full key: those of its Hugging Face folder.

    Raises:
        ConfigError: The family cannot represent the record.
    """
    return {"model.family": preset.family, **config_from_hf(family_of(preset), preset.config_json)}


def run_values(request: Request, nproc: int) -> dict[str, Any]:
    """Return the values of a run by full key, without those of a layout.

    Args:
        nproc: Devices of one node.
    """
    preset = request.preset
    model = model_values(preset)
    seq_length = request.seq_length or preset.default_seq_length
    batch = request.global_batch_size or -(-256 // request.devices) * request.devices
    values = {
        "platform": request.platform,
        "task": request.task,
        "run.output_dir": f"runs/{preset.name}",
        "run.nproc": nproc,
        **model,
        "data.train": [*request.train] or [DATASET],
        "data.tokenizer": request.tokenizer,
        "data.seq_length": seq_length,
        "train.micro_batch_size": 1,
        "train.global_batch_size": batch,
    }
    if _has_template(request.task):
        values[f"plugins.{request.task}.template"] = preset.template
    return {key: value for key, value in values.items() if value is not None}


def _has_template(task: str) -> bool:
    """Return whether a task has the option ``template``; an unknown task is refused later."""
    catalogue = discover()
    if task not in catalogue:
        return False
    options = getattr(catalogue.load([task])[task], "config_class", None)
    return options is not None and "template" in attrs.fields_dict(options)


def raw_config(values: Mapping[str, Any], origin: str) -> RawConfig:
    """Return values as the input of ``prepare``."""
    return RawConfig(values={key: RawValue(value, origin) for key, value in values.items()})
