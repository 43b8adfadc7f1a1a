"""Add an adapter in PEFT format to the weights of a Hugging Face model::

    python -m ascend_run.plugins.fine_tuning.lora.merging BASE ADAPTER TARGET

One file of the base is held at a time; no model is built.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ascend_run.ops.linear.low_rank import low_rank_update, scale_of, with_update
from ascend_run.ops.linear.peft_settings import MAGNITUDE, alpha_of, rank_of, saved_tensors
from ascend_run.plugin_api import AscendRunError, CheckpointError, StorageError
from ascend_run.text.file_collisions import NamedPath, refuse_collisions

from .merged_experts import expert_counts, expert_update, weight_of_expert
from .peft_config import PREFIX, TENSOR_FILE, StoredAdapter, neutral_problems, read_adapter
from .saved_modules import TIED

_ADAPTER: Final = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")


def merge_folders(base: Path, adapter: Path, target: Path) -> int:
    """Write ``base`` with ``W + scale * B A`` for every adapted W.

    Every other file of the base is copied. Matmuls and sums are computed in float64 and converted
    to the base's dtype; for bf16 and fp16, torch rounds them to float32 first.

    Args:
        target: Must not exist, or be empty; written beside and renamed when complete.

    Returns:
        The number of adapted weights.

    Raises:
        CheckpointError: A folder cannot be read, or the adapter does not fit this base.
        ConfigError: The target lies in one of the other two.
        StorageError: The target is not empty, or the file system raises an error.
    """
    found = read_adapter(adapter, "ADAPTER")
    problems = list(neutral_problems(found))
    files = sorted(base.glob("*.safetensors"))
    if not files:
        problems.append(f"{base} has no .safetensors file")
    if problems:
        raise CheckpointError("the adapter cannot be merged", problems)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StorageError(f"{target} exists and is not empty; name a new folder")
    refuse_collisions(
        (),
        [NamedPath("TARGET", target)],
        [NamedPath("BASE", base), NamedPath("ADAPTER", adapter)],
    )
    wanted = {match[1] for name in found.shapes if (match := _ADAPTER.fullmatch(name))}
    wanted |= {module_of_tensor(name) for name in saved_tensors(found.shapes).values()}
    if {*map(module_of_tensor, TIED)} <= wanted and not _has(files, TIED[1]):
        wanted.remove(module_of_tensor(TIED[1]))  # the base has a tied embedding once
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            done = _write(base, found, beside, files, wanted)
            if missing := sorted(wanted - done):
                raise CheckpointError(
                    f"the adapter in {adapter} does not fit the model in {base}",
                    [f"{name}.weight is not in the model" for name in missing],
                )
            beside.chmod(0o755)  # mkdtemp creates it with mode 0700
            beside.replace(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except SafetensorError as error:
        raise CheckpointError(f"{base} or {adapter} cannot be read: {error}") from None
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from None
    return len(done)


def _scale(config: Mapping[str, Any], module: str) -> float:
    rslora = bool(config.get("use_rslora"))
    return scale_of(alpha_of(config, module), rank_of(config, module), rslora=rslora)


def _write(
    base: Path, adapter: StoredAdapter, out: Path, files: Sequence[Path], wanted: set[str]
) -> set[str]:
    """Write every file of the base with the adapted weights; return the names of those found."""
    done: set[str] = set()
    counts = expert_counts(_names(files))
    with safe_open(adapter.folder / TENSOR_FILE, framework="pt") as matrices:
        for path in base.iterdir():
            if path.is_file() and path not in files:
                shutil.copy2(path, out / path.name)
        for path in files:
            with safe_open(path, framework="pt") as stored:
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (not a mapping)
                metadata = stored.metadata()
            for name, weight in tensors.items():
                if (update := expert_update(name, adapter.config)) and update.module in wanted:
                    delta = update.of(
                        adapter.config, matrices, weight, counts[weight_of_expert(name)]
                    )
                    tensors[name] = with_update(weight, delta)
                    done.add(update.module)
                    continue
                module = module_of_tensor(name)
                if module not in wanted:
                    continue
                in_full = f"{PREFIX}{module}.weight"
                if in_full in adapter.shapes:
                    tensors[name] = _replaced(weight, matrices.get_tensor(in_full), module)
                else:
                    scale = _scale(adapter.config, module)
                    tensors[name] = _merged(
                        weight,
                        matrices,
                        module,
                        scale,
                        rank=rank_of(adapter.config, module),
                        dora=bool(adapter.config.get("use_dora")),
                    )
                done.add(module)
            save_file(tensors, out / path.name, metadata=metadata)
    return done


def module_of_tensor(name: str) -> str:
    """Return the module in Hugging Face's model that owns a stored tensor."""
    return name.removesuffix(".weight").replace(".block_sparse_moe.", ".mlp.")


def _has(files: Sequence[Path], name: str) -> bool:
    return name in _names(files)


def _names(files: Sequence[Path]) -> Iterator[str]:
    """Yield the names of every tensor of the base."""
    for path in files:
        with safe_open(path, framework="pt") as stored:
            yield from stored.keys()


def _replaced(weight: Tensor, saved: Tensor, module: str) -> Tensor:
    """Return the weight of a module that was trained in full, in the base's dtype."""
    if saved.shape != weight.shape:
        raise CheckpointError(
            f"{module}: the adapter has a weight of {list(saved.shape)}, the model one of "
            f"{list(weight.shape)}"
        )
    return saved.to(weight.dtype)


def _merged(
    weight: Tensor, matrices: Any, module: str, scale: float, *, rank: int, dora: bool
) -> Tensor:
    prefix = f"base_model.model.{module}"
    magnitude = matrices.get_tensor(f"{prefix}.{MAGNITUDE}") if dora else None
    a, b = (matrices.get_tensor(f"{prefix}.lora_{part}.weight") for part in "AB")
    if (b.shape[0], a.shape[1]) != tuple(weight.shape):
        raise CheckpointError(
            f"{module}: the adapter is for a weight of {[b.shape[0], a.shape[1]]}, the model has "
            f"{list(weight.shape)}"
        )
    if (len(a), b.shape[1]) != (rank, rank):
        raise CheckpointError(
            f"{module}: lora_A is {[*a.shape]} and lora_B {[*b.shape]}, but the adapter's config "
            f"has rank {rank}; save the adapter again"
        )
    update = low_rank_update(a, b, scale, torch.float64)
    return with_update(weight, update, magnitude)


@click.command()
@click.argument("base", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("adapter", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
def command(base: Path, adapter: Path, target: Path) -> None:
    """Write the Hugging Face model BASE, with ADAPTER added to its weights, to TARGET."""
    try:
        merged = merge_folders(base, adapter, target)
    except AscendRunError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(f"{target}: {merged} weights changed")


if __name__ == "__main__":
    with torch.no_grad():
        command()
