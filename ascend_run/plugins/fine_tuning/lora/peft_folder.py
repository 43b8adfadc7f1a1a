"""Read and write adapters in PEFT format; every rank reads its own shard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor, nn

from ascend_run.plugin_api import CheckpointError, RunConfig, RunContext, StorageError

from .adapter import Adapter, adapters
from .peft_config import CONFIG_FILE, PREFIX, TENSOR_FILE, export_folder, peft_config
from .targets import adapted, peft_module

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
            for name, target, dim, place in _stored_parts(adapters(model), config):
                if name not in names:
                    problems.append(f"{name} is missing")
                    continue
                part = stored.get_slice(name)
                whole = list(target.shape)
                size = place[1]
                whole[dim] *= size
                if list(part.get_shape()) != whole:
                    problems.append(f"{name} is {list(part.get_shape())}, expected {whole}")
                    continue
                begin = place[0] * target.shape[dim]
                cut = slice(begin, begin + target.shape[dim])
                target.copy_(part[cut] if dim == 0 else part[:, cut])
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if problems:
        raise CheckpointError(f"the adapter in {folder} does not fit this model", problems)


def _stored_parts(
    found: list[Adapter], config: RunConfig
) -> Iterator[tuple[str, Tensor, int, tuple[int, int]]]:
    """Yield (PEFT's name, this rank's tensor, sharded dim, (index, number) of shards)."""
    for adapter in found:
        tp = (adapter.tp_group.rank(), adapter.tp_group.size())
        of_b = tp if adapter.is_column and not adapter.shares_groups else (0, 1)
        for part, block in adapter.blocks_of_a():
            name = PREFIX + peft_module(part, adapter.layer, config.model.family)
            a, b = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
            yield a, block, 1, (0, 1) if adapter.is_column else tp
            yield b, adapter.lora_B[part], 0, of_b


@torch.no_grad()
def export_adapters(context: RunContext, role: str, options: LoraOptions) -> None:
    """Write the adapters of the full model to the run's folder. Called on every rank.

    Raises:
        StorageError: The file system raises an error.
    """
    config, groups = context.config, context.groups
    if groups.dp_cp.rank() != 0:
        return
    tensors: dict[str, Tensor] = {}
    for chunk in context.models[role].chunks:
        for name, tensor, dim, (_, size) in _stored_parts(adapters(chunk), config):
            whole = tensor.detach().contiguous()
            if size > 1:
                shards = [torch.empty_like(whole) for _ in range(size)]
                dist.all_gather(shards, whole, group=groups.tp)
                whole = torch.cat(shards, dim)
            tensors[name] = whole.cpu().clone()
    if groups.tp.rank() != 0:
        return
    if groups.pp.size() > 1:
        tensors = _of_all_stages(tensors, groups.pp, context.device.torch_device)
    if groups.pp.rank() == 0:
        parts = adapted(options.target_modules, config)
        _write(export_folder(config), tensors, peft_config(config, options, parts))


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


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    """Write each file beside its target and rename it when complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f".{TENSOR_FILE}.new"
        save_file(tensors, beside, metadata={"format": "pt"})
        os.replace(beside, folder / TENSOR_FILE)
        beside = folder / f".{CONFIG_FILE}.new"
        beside.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, folder / CONFIG_FILE)
    except OSError as error:
        raise StorageError(
            f"the adapter cannot be written to {folder}: {error.strerror or error}"
        ) from None
