"""``torch_dist``: the distributed checkpoints of Megatron core.

Names are those of the unsharded model. Layers of a homogeneous model are stacked: one tensor
``decoder.layers.mlp.linear_fc2.weight`` [L, ...] with a chunk per layer; otherwise the name has the
layer's number. Experts are stacked behind the layers, as ``mlp.experts.experts.linear_fc1.weight``.
Source: megatron-core 0.16, ``TransformerBlock.sharded_state_dict`` and ``SequentialMLP``.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from pathlib import Path
from typing import IO, Any, Final

import attrs
import torch
from torch import Tensor

from ascend_run.core.checkpoint.boxes import Box, tiling_problem, whole
from ascend_run.core.hugging_face.parameter_rows import VOCABULARY_PARAMETERS
from ascend_run.core.run_files import CONFIG_NAME
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.tools.convert.new_folder import new_folder
from ascend_run.types.config import RunConfig

from .latent_attention import require_megatron_attention
from .megatron_args import make_args
from .megatron_names import Names, ours, theirs
from .model_source import ModelSource, Progress
from .mp_rank_files import TRACKER
from .parameter_shards import EXPERTS, LAYER, expected_shape, require_known
from .safe_pickle import load_bytes
from .shard_layout import LayoutOptions
from .torch_dist_index import INDEX, IndexedTensor, read_index

COMMON: Final = "common.pt"
"""The values that are not sharded: args, iteration."""
_FILE: Final = "__0_0.distcp"
_STACKED: Final = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_MODEL: Final = ("embedding.", "decoder.", "output_layer.")
_EXPERTS: Final = re.compile(r"mlp\.experts\.experts\.linear_(fc[12])\.(weight|bias)")


@attrs.frozen
class _Slice:
    """A parameter's tensor, and its layer if layers are stacked in it."""

    key: str
    layer: int | None


class TorchDistModel:
    """The parameters of a checkpoint.

    Raises:
        CheckpointError: A tensor is incomplete or has another shape than the config says.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self._tensors = read_index(folder)
        self._slices: dict[str, _Slice] = {}
        self.headers: dict[str, Tensor] = {}
        self._vocabulary = config.model.vocab_size
        problems = []
        for key, tensor in self._tensors.items():
            if not key.startswith(_MODEL) or "_extra_state" in key:
                continue
            boxes = [chunk.box for chunk in tensor.chunks]
            if problem := tiling_problem(tensor.shape, boxes):
                problems.append(f"{key}: {problem}")
                continue
            stacked = _STACKED.fullmatch(key)
            if stacked and tensor.shape[0] != config.model.num_layers:
                problems.append(
                    f"{key}: {tensor.shape[0]} layers, expected {config.model.num_layers}"
                )
                continue
            layers = range(tensor.shape[0]) if stacked else (None,)
            for layer in layers:
                name = f"decoder.layers.{layer}.{stacked[1]}" if stacked else key
                self._add(_our_name(name), _Slice(key, layer), tensor)
        for name, header in self.headers.items():
            wanted = expected_shape(name, config)
            if wanted is not None and tuple(header.shape) != wanted:
                problems.append(f"{name}: {list(header.shape)}, expected {list(wanted)}")
        if problems:
            raise CheckpointError(f"{folder} does not match this model", problems)

    def read(self, name: str) -> Tensor:
        """Read one parameter from the chunks that hold it.

        Raises:
            CheckpointError: A file is missing, truncated, or holds something else.
        """
        at, header = self._slices[name], self.headers[name]
        result = torch.empty_like(header, device="cpu")
        box = whole(tuple(header.shape))
        lead = () if at.layer is None else (at.layer,)
        target = Box((*lead, *box.offset), (*(1 for _ in lead), *box.shape))
        view = result[None] if lead else result
        for chunk in self._tensors[at.key].chunks:
            if (shared := target.intersect(chunk.box)) is None:
                continue
            held = self._chunk(chunk.file, chunk.offset, chunk.length)
            if tuple(held.shape) != chunk.box.shape or held.dtype != header.dtype:
                raise CheckpointError(
                    f"{self.folder / chunk.file}: {at.key} has a chunk of {held.dtype} "
                    f"{list(held.shape)}, expected {header.dtype} {list(chunk.box.shape)}"
                )
            view[shared.slices_in(target)] = held[shared.slices_in(chunk.box)]
        return result

    def _add(self, name: str, at: _Slice, tensor: IndexedTensor) -> None:
        shape = tensor.shape if at.layer is None else tensor.shape[1:]
        if name in VOCABULARY_PARAMETERS:
            shape = (min(shape[0], self._vocabulary), *shape[1:])
        self.headers[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        self._slices[name] = at

    def _chunk(self, file: str, offset: int, length: int) -> Tensor:
        path = self.folder / file
        try:
            with path.open("rb") as stream:
                if offset < 0 or length < 0 or offset + length > os.fstat(stream.fileno()).st_size:
                    raise CheckpointError(
                        f"{path} is truncated: it has no {length} bytes at {offset}"
                    )
                stream.seek(offset)
                data = stream.read(length)
        except OSError as problem:
            raise CheckpointError(f"{path} cannot be read: {problem.strerror}") from None
        held = load_bytes(io.BytesIO(data), str(path))
        if not isinstance(held, Tensor):
            raise CheckpointError(f"{path} holds a {type(held).__name__}, not a tensor")
        return held


def write_torch_dist(
    target: Path, source: ModelSource, progress: Progress, *, names: Names = Names.LOCAL
) -> None:
    """Write one file of tensors, its index, and what Megatron stores beside them.

    Args:
        names: Of Megatron's local modules or of Transformer Engine's.

    Raises:
        CheckpointError: A parameter is missing, or unknown.
        StorageError: The target is not empty or cannot be written.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

    source.require_complete("a torch_dist checkpoint")
    require_known(source.headers, source.config, "a torch_dist checkpoint")
    require_megatron_attention(source.config)
    iteration = max(source.step, 1)
    with new_folder(target, 0o755) as beside:
        folder = beside / f"iter_{iteration:07d}"
        folder.mkdir()
        tensors, storage = _described(source, names), {}
        with (folder / _FILE).open("xb") as file:
            for name, tensor in source.parameters(progress):
                key, layer = _stored_name(name, source.config, names)
                chunk = tensor if layer is None else tensor[None]
                offsets = torch.Size((layer or 0, *(0,) * (chunk.dim() - 1)))
                begin, length = _append(file, chunk)
                storage[MetadataIndex(key, offsets)] = _StorageInfo(_FILE, begin, length)
        index = Metadata(tensors, None, storage, StorageMeta())
        (folder / INDEX).write_bytes(pickle.dumps(index))
        backends = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (folder / "metadata.json").write_text(json.dumps(backends), "utf-8")
        args = make_args(
            source.config,
            LayoutOptions(),
            padded_rows=source.config.model.vocab_size,
            transformer_impl=str(names),
            iteration=iteration,
        )
        common = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
        torch.save(common, folder / COMMON)
        (beside / CONFIG_NAME).write_text(source.config_toml, "utf-8")
        (beside / TRACKER).write_text(str(iteration), "utf-8")


def _described(source: ModelSource, names: Names) -> dict[str, Any]:
    """Return the index's entry of every tensor."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    for name, header in source.headers.items():
        key, layer = _stored_name(name, source.config, names)
        shape = tuple(header.shape)
        lead = () if layer is None else (layer,)
        sizes = (*(1 for _ in lead), *shape)
        full = (*(source.config.model.num_layers for _ in lead), *shape)
        chunk = ChunkStorageMetadata(
            offsets=torch.Size((*lead, *(0,) * len(shape))), sizes=torch.Size(sizes)
        )
        entry = entries.setdefault(
            key, TensorStorageMetadata(TensorProperties(header.dtype), torch.Size(full), [])
        )
        entry.chunks.append(chunk)
    return entries


def _append(file: IO[bytes], tensor: Tensor) -> tuple[int, int]:
    """Append a tensor as ``torch.save`` writes it; return its position and length."""
    begin = file.tell()
    buffer = io.BytesIO()
    torch.save(tensor.contiguous().clone(), buffer)
    file.write(buffer.getbuffer())
    return begin, file.tell() - begin


def _our_name(name: str) -> str:
    name = ours(name)
    match = LAYER.fullmatch(name)
    if match is not None and (experts := _EXPERTS.fullmatch(match[2])):
        bias = "_bias" if experts[2] == "bias" else ""
        return f"decoder.layers.{match[1]}.mlp.experts.{experts[1]}{bias}"
    return name


def _stored_name(name: str, config: RunConfig, names: Names) -> tuple[str, int | None]:
    """Return the name in the checkpoint, and the layer if layers are stacked.

    Megatron's local modules name the norms of a layer's input as Transformer Engine's do, also
    where the latter keep them apart; not so with multi-latent attention (source:
    ``get_gpt_layer_local_spec``).
    """
    match = LAYER.fullmatch(name)
    if match is None:
        return name, None
    model = config.model
    latent, inner = bool(model.multi_latent_attention), match[2]
    if names is Names.TRANSFORMER_ENGINE:
        has_experts = int(match[1]) in moe_layers(model)
        named = theirs(name, Names.TRANSFORMER_ENGINE, has_experts=has_experts, latent=latent)
        inner = named.removeprefix(f"decoder.layers.{match[1]}.")
    elif not latent:
        inner = re.sub(r"^input_layernorm\.", "self_attention.linear_qkv.layer_norm_", inner)
        inner = re.sub(r"^pre_mlp_layernorm\.", "mlp.linear_fc1.layer_norm_", inner)
    if (experts := EXPERTS.fullmatch(name)) is not None:
        linear, _, bias = experts[1].partition("_")
        inner = f"mlp.experts.experts.linear_{linear}.{bias or 'weight'}"
    sparse = model.num_moe_experts and model.moe_layer_freq != 1
    if sparse:
        return f"decoder.layers.{match[1]}.{inner}", None
    return f"decoder.layers.{inner}", int(match[1])
