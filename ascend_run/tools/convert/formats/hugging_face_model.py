"""The model of a Hugging Face folder."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_run.core.hugging_face.importing import matched_sources, read_rows, runs_of_shards
from ascend_run.core.hugging_face.parameter_rows import ParameterSource
from ascend_run.core.hugging_face.stored_tensors import StoredTensors
from ascend_run.plugin_api.contracts import ModelFamily, TensorShard
from ascend_run.types.config import RunConfig


class HfModel:
    """The full model of a Hugging Face folder, read parameter by parameter in the stored dtypes.

    The vocabulary is not padded.

    Args:
        stored: The open folder.

    Raises:
        CheckpointError: See ``load_hf_weights``.
    """

    def __init__(self, stored: StoredTensors, family: ModelFamily, config: RunConfig) -> None:
        self._stored = stored
        sources = matched_sources(stored, family, config)
        shards = [_header(source, stored) for source in sources.values()]
        self._runs = runs_of_shards(shards, sources, stored, family, config)
        self.headers = {shard.key: shard.tensor for shard in shards}
        """Name -> tensor on the device ``meta``."""

    def read(self, name: str) -> Tensor:
        """Read a parameter; a view of the mapped file if one stored tensor holds it."""
        header = self.headers[name]
        parts = [
            read_rows(self._stored, run, run.start, run.start + run.rows)
            for run in self._runs[name]
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.to(header.dtype).reshape(header.shape)


def _header(source: ParameterSource, stored: StoredTensors) -> TensorShard:
    """Return a parameter, without data, of the size of the stored tensors it is built from."""
    parts = [stored.shape(name) for name in source.hf[0]]
    if source.transposed:
        parts = [(*shape[:-2], shape[-1], shape[-2]) for shape in parts]
    shape = (sum(part[0] for part in parts), *parts[0][1:])
    if source.form == "stack_experts":
        shape = (len(source.hf), *shape)
    tensor = torch.empty(shape, dtype=stored.dtype(source.hf[0][0]), device="meta")
    return TensorShard(key=source.name, tensor=tensor, global_shape=shape, offset=(0,) * len(shape))
