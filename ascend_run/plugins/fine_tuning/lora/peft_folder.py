"""Read and write adapters in PEFT format; every rank reads its own shard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor, nn

from ascend_run.ops.linear.peft_base import metadata_of
from ascend_run.ops.linear.peft_settings import untied
from ascend_run.plugin_api import CheckpointError, RunConfig, RunContext, StorageError

from .peft_config import CONFIG_FILE, PREFIX, TENSOR_FILE, export_folder, peft_config
from .saved_modules import EMBEDDING, TIED, is_tied
from .stored_experts import StoredExperts, stored_experts
from .stored_parts import StoredPart, stored_parts
from .targets import adapted

if TYPE_CHECKING:
    from . import LoraOptions


@torch.no_grad()
def load_adapters(
    folder: str | Path, model: nn.Module, config: RunConfig, options: LoraOptions
) -> None:
    """Fill the adapters of a model chunk.

    Raises:
        CheckpointError: Tensors are missing or have another shape; lists all of them.
    """
    path, problems = Path(folder) / TENSOR_FILE, []
    try:
        with safe_open(path, framework="pt") as stored:
            names = {*stored.keys()}
            parts = stored_parts(model, config, options), stored_experts(model, config, options)
            for part in chain[StoredPart | StoredExperts](*parts):
                if part.name not in names:
                    problems.append(f"{part.name} is missing")
                    continue
                found = stored.get_slice(part.name)
                if [*found.get_shape()] != part.shape:
                    problems.append(f"{part.name} is {[*found.get_shape()]}, expected {part.shape}")
                    continue
                part.fill(found)
            problems += _untied(stored, [PREFIX + name for name in TIED if is_tied(config)])
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if problems:
        raise CheckpointError(f"the adapter in {folder} does not fit this model", problems)


def _untied(stored: Any, names: Sequence[str]) -> Iterator[str]:
    """Yield that a tied embedding was trained apart from its copy in the file."""
    is_there = names and {*names} <= {*stored.keys()}
    if is_there and not torch.equal(*map(stored.get_tensor, names)):
        yield untied(*TIED)


@torch.no_grad()
def export_adapters(context: RunContext, role: str, options: LoraOptions, base: str | None) -> None:
    """Write the adapters of the full model to the run's folder. Called on every rank.

    Args:
        base: Digest of the weights beside them, if it is known.

    Raises:
        StorageError: The file system raises an error.
    """
    config, groups = context.config, context.groups
    chunks = context.models[role].chunks
    is_first = groups.dp_cp.rank() == 0
    keeps = is_first and groups.tp.rank() == 0
    tensors: dict[str, Tensor] = {}

    def keep(name: str, whole: Tensor) -> None:
        if keeps:  # others take part in the gathers alone, so one copy is in a group's memory
            tensors[name] = whole.cpu().clone()

    # Ranks with different experts are ranks of data parallelism.
    for part in chain.from_iterable(stored_experts(chunk, config, options) for chunk in chunks):
        keep(part.name, part.gathered())
    if not is_first:
        return
    for one in chain.from_iterable(stored_parts(chunk, config, options) for chunk in chunks):
        keep(one.name, one.gathered(groups.tp))
    if not keeps:
        return
    if is_tied(config) and EMBEDDING in options.modules_to_save:  # PEFT's files have it twice
        embedding, output = (PREFIX + name for name in TIED)
        tensors |= {output: tensors[embedding].clone()} if embedding in tensors else {}
    if groups.pp.size() > 1:
        tensors = _of_all_stages(tensors, groups.pp, context.device.torch_device)
    if groups.pp.rank() == 0:
        parts = adapted(options.target_modules, config)
        metadata = metadata_of(base)
        _write(export_folder(config), tensors, metadata, peft_config(config, options, parts))


def _of_all_stages(
    tensors: dict[str, Tensor], group: dist.ProcessGroup, device: torch.device
) -> dict[str, Tensor]:
    """Gather the tensors of every rank of a group as safetensors bytes, without pickle."""
    data = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8).to(device)
    length = torch.tensor([data.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(group.size())]
    dist.all_gather(lengths, length, group=group)
    padded = data.new_zeros(max(int(n) for n in lengths))
    padded[: data.numel()] = data
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    stages = (
        load(part[: int(n)].cpu().numpy().tobytes())
        for part, n in zip(received, lengths, strict=True)
    )
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def _write(
    folder: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    config: dict[str, object],
) -> None:
    """Write each file beside its target and rename it when complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f".{TENSOR_FILE}.new"
        save_file(tensors, beside, metadata=metadata)
        os.replace(beside, folder / TENSOR_FILE)
        beside = folder / f".{CONFIG_FILE}.new"
        beside.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, folder / CONFIG_FILE)
    except OSError as error:
        raise StorageError(
            f"the adapter cannot be written to {folder}: {error.strerror or error}"
        ) from None
