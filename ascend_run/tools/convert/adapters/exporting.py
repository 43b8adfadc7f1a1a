"""Write the adapters of a run as a folder in PEFT's format, which ``PeftModel`` loads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open

from ascend_run.core.hugging_face.parameter_rows import parameter_sources
from ascend_run.ops.linear.peft_base import metadata_of
from ascend_run.ops.linear.peft_writing import Adapted, written_settings
from ascend_run.ops.weight_sources import weights_digest
from ascend_run.plugin_api.errors import CheckpointError, ConfigError
from ascend_run.tools.convert.formats.model_source import ModelSource, Progress
from ascend_run.tools.convert.new_folder import new_folder
from ascend_run.tools.convert.opening_runs import open_run
from ascend_run.tools.convert.safetensors_shards import SafetensorsShards
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.convert.write_queue import write_queue

from .expert_adapters import PeftExperts, peft_experts
from .peft import CONFIG, TENSORS
from .peft_tensors import PeftModule, peft_modules, peft_tensors
from .run_adapters import adapter_record, alpha_of_part, has_adapters
from .saved_modules import modules_to_save, peft_readers


@attrs.frozen(kw_only=True)
class RunAdapters:
    """The adapters of a checkpoint, as PEFT stores them."""

    model: ModelSource
    """The matrices, by PEFT's names."""
    settings: Mapping[str, object]
    """Content of ``adapter_config.json``."""
    metadata: Mapping[str, str]
    """Of the file of matrices."""


def open_run_adapters(path: Path, options: SourceOptions) -> RunAdapters:
    """Open the adapters of a run; nothing but headers is read.

    Args:
        options: ``base`` is the folder that ``adapter_config.json`` names, by default the run's
            ``model.hf_path``. Of other weights than the run's, it is taken at the user's word: the
            file then does not tell to which weights it belongs.

    Raises:
        CheckpointError: The checkpoint has no adapters, or some have no form in PEFT's format.
        ConfigError: The run's config cannot be used.
    """
    run = open_run(path, options)
    if not has_adapters(run.source.headers):
        raise CheckpointError(f"{path} has no adapters; only a run with lora has any to write")
    record = adapter_record(run.values, run.source)
    modules = peft_modules(run.source)
    experts = peft_experts(run.source)
    headers, readers = peft_tensors(run.source, modules)
    for one in experts:
        for name, header, reader in one.tensors(run.source):
            headers[name], readers[name] = header, reader
    saved: list[str] = []
    for name, header, reader in peft_readers(run.source, record.get("modules_to_save", ())):
        headers[name], readers[name] = header, reader
        saved.append(name)
    base = options.base or run.hf_path
    more = {
        **modules_to_save(run.source, saved),
        "base_model_name_or_path": None if base is None else str(base),
        "lora_dropout": run.given.get("plugins.lora.dropout", 0.0),
    }
    is_the_runs = options.base is None or _digest(options.base) == record["base"]
    return RunAdapters(
        model=attrs.evolve(run.source, headers=headers, read=lambda name: readers[name]()),
        settings=_settings(run.source, modules, experts, record, more),
        metadata=metadata_of(record["base"] if is_the_runs else None),
    )


def _digest(base: Path) -> str:
    """
    Raises:
        ConfigError: It is no folder with weights in Hugging Face's format.
    """
    if not any(base.glob("*.safetensors")):
        raise ConfigError(f"--base: {base} is no Hugging Face folder with .safetensors files")
    return weights_digest(base)


def write_peft(target: Path, adapters: RunAdapters, progress: Progress) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` to a new folder.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        StorageError: The target is not empty or cannot be written.
    """
    with new_folder(target, 0o755) as beside:
        names, metadata = adapters.model.headers, adapters.metadata
        shards = SafetensorsShards(beside, names, math.inf, TENSORS, metadata)
        try:
            with write_queue() as writes:
                for name, tensor in adapters.model.parameters(progress):
                    writes.submit(shards.add, name, tensor)
            shards.close()
        finally:
            shards.abandon()
        text = json.dumps(adapters.settings, indent=2) + "\n"
        (beside / CONFIG).write_text(text, "utf-8")


def read_back(adapters: RunAdapters, folder: Path, stack: ExitStack) -> ModelSource:
    """Open the matrices that were written."""
    file = stack.enter_context(safe_open(folder / TENSORS, framework="pt"))
    headers = {
        name: torch.empty(file.get_slice(name).get_shape(), device="meta")
        for name in [*file.keys()]
    }
    return attrs.evolve(adapters.model, folder=folder, headers=headers, read=file.get_tensor)


def _settings(
    source: ModelSource,
    modules: Sequence[PeftModule],
    experts: Sequence[PeftExperts],
    record: Mapping[str, Any],
    more: Mapping[str, object],
) -> dict[str, object]:
    """Return what a plain LoRA of these modules has in ``adapter_config.json``."""
    first: PeftModule | PeftExperts = modules[0] if modules else experts[0]
    adapted = [
        Adapted(
            name=one.module,
            rank=one.rank,
            alpha=alpha_of_part(record, one.linear.rpartition(".")[2], one.part),
        )
        for one in modules
    ]
    adapted += [
        Adapted(
            name=one.parameter,
            rank=one.rank,
            alpha=alpha_of_part(record, "experts", one.matrices.part),
            is_stacked=True,
        )
        for one in experts
    ]
    every = {
        name.removesuffix(".weight")
        for parameter in parameter_sources(source.family, source.config).values()
        for name in parameter.hf_names
    }
    return written_settings(
        adapted,
        every.difference(one.module for one in modules),
        rank=record.get("rank", first.rank),
        alpha=record["alpha"],
        num_labels=source.config.model.num_labels,
        more={
            "fan_in_fan_out": any(one.transposed for one in modules),
            "use_dora": record.get("dora", False),
            "use_rslora": record["rslora"],
            **more,
        },
    )
