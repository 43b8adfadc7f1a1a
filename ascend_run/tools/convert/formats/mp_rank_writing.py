"""Write a model as the ``mp_rank_*`` folders of Megatron or MindSpeed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import attrs
from torch import Tensor

from ascend_run.core.config.vocabulary import padded_vocab_size
from ascend_run.core.hugging_face.parameter_rows import (
    EMBEDDING,
    OUTPUT_LAYER,
    VOCABULARY_PARAMETERS,
)
from ascend_run.core.run_files import CONFIG_NAME
from ascend_run.plugin_api.errors import CheckpointError, LayoutError
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.tools.convert.new_folder import new_folder
from ascend_run.tools.convert.write_queue import write_queue

from .expert_shards import ExpertNames, is_replicated, split_experts
from .latent_attention import with_mindspeed_modules
from .megatron_args import make_args
from .megatron_names import Names, head_copy, nested, theirs
from .model_source import ModelSource, Progress
from .mp_rank_files import FILE_NAME, TRACKER
from .mp_rank_options import MpRankOptions, for_biases_of_experts, require_latent, unwritable
from .parameter_shards import (
    EXPERTS,
    LAYER,
    Split,
    divided,
    require_known,
    shard,
    split_of,
    vocabulary_shard,
)
from .pickled_file import PickledFile
from .shard_layout import Rank, ShardLayout, shard_layout

_VERSION: Final = 3.0


class _Shard(NamedTuple):
    rank: Rank
    key: str
    """Chunk and name in the file, separated by ``/``."""
    tensor: Tensor


def write_mp_rank(
    target: Path, source: ModelSource, options: MpRankOptions, progress: Progress
) -> None:
    """Write all files in one pass over the parameters, with one of them in memory.

    Raises:
        LayoutError: The model is not divisible like that.
        CheckpointError: A parameter is missing, or Megatron has no such parameter.
        StorageError: The target is not empty or cannot be written.
    """
    source.require_complete("Megatron's mp_rank_* files")
    require_known(source.headers, source.config, "mp_rank_* files")
    require_latent(options, source.config)
    if options.mla_qkv_concat:
        built = with_mindspeed_modules(
            source.headers, source.read, source.config, mm_split=options.mla_mm_split
        )
        source = attrs.evolve(source, headers=built.headers, read=built.read)
    writer = _Writer(source, options)
    files = writer.planned()
    with new_folder(target, 0o755) as beside:
        iteration = max(source.step, 1)  # Megatron takes 0 for "no checkpoint"
        folder = beside / f"iter_{iteration:07d}"
        opened: dict[Rank, PickledFile] = {}
        for rank, tensors in files.items():
            at = folder / writer.layout.folder(rank)
            at.mkdir(parents=True)
            opened[rank] = PickledFile(at / FILE_NAME, tensors, writer.arranger(rank, iteration))
        with write_queue() as writes:
            for name, tensor in source.parameters(progress):
                for part in writer.shards(name, tensor):
                    writes.submit(opened[part.rank].write, part.key, part.tensor.contiguous())
        for file in opened.values():
            file.close()
        (beside / CONFIG_NAME).write_text(source.config_toml, "utf-8")
        (beside / TRACKER).write_text(str(iteration), "utf-8")


class _Writer:
    """Distributes parameters over the ranks of a layout."""

    def __init__(self, source: ModelSource, options: MpRankOptions) -> None:
        model = source.config.model
        self.source = source
        self.config = source.config
        self.options = for_biases_of_experts(options, self.config)
        self.layout: ShardLayout = shard_layout(
            self.options.layout, model.num_layers, model.num_moe_experts
        )
        self.sparse = moe_layers(model)
        multiple = options.make_vocab_size_divisible_by or model.make_vocab_size_divisible_by
        tp = self.layout.tp
        self.vocabulary_rows = padded_vocab_size(model.vocab_size, multiple, tp) // tp
        self.slots = {
            number: (*place, slot)
            for place, numbers in self.layout.chunks.items()
            for slot, number in enumerate(numbers)
            if number is not None
        }

    def planned(self) -> dict[Rank, dict[str, Tensor]]:
        """Return what each rank's file will hold, without data.

        Raises:
            CheckpointError, LayoutError: See ``write_mp_rank``.
        """
        unknown, uneven = [], []
        for name, header in self.source.headers.items():
            if problem := unwritable(name, self.options):
                unknown.append(problem)
            if (of_experts := EXPERTS.fullmatch(name)) is not None:
                if problem := self._uneven_experts(of_experts[1], header):
                    uneven.append(problem)
                continue
            split = self._split_of(name)
            axis = header.shape[1] if split is Split.COLUMNS else header.shape[0]
            if problem := divided(axis, split, self.layout.tp, self.config, name):
                uneven.append(problem)
        if unknown:
            raise CheckpointError("this model cannot be written as mp_rank_* files", unknown)
        if uneven:
            raise LayoutError("this model cannot be distributed like that", sorted({*uneven}))
        files: dict[Rank, dict[str, Tensor]] = {rank: {} for rank in self.layout.ranks()}
        for name, header in self.source.headers.items():
            for part in self.shards(name, header):
                files[part.rank][part.key] = part.tensor
        return files

    def shards(self, name: str, tensor: Tensor) -> Iterator[_Shard]:
        """Yield the shards of a parameter for every file."""
        for stage, chunk, local in self._locations(name):
            for tp, ep in sorted(self.layout.rank_pairs()):
                rank = Rank(tp, stage, ep)
                for inner, part in self._rank_shards(name, local, tensor, rank):
                    yield _Shard(rank, f"{chunk}/{inner}", part)

    def arranger(
        self, rank: Rank, iteration: int
    ) -> Callable[[Mapping[str, Tensor]], dict[str, Any]]:
        """Return a function that builds a rank's file from its tensors."""

        def arrange(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
            count = self.layout.chunks_per_stage
            chunks: list[dict[str, Any]] = [{} for _ in range(count)]
            for key, tensor in tensors.items():
                chunk, _, name = key.partition("/")
                chunks[int(chunk)][name] = tensor
            if self.options.names is Names.LEGACY:
                chunks = [nested(chunk) for chunk in chunks]
            keys = ["model"] if count == 1 else [f"model{n}" for n in range(count)]
            return {
                "args": self._args(),
                "checkpoint_version": _VERSION,
                "iteration": iteration,
                **dict(zip(keys, chunks, strict=True)),
            }

        return arrange

    def _locations(self, name: str) -> Iterator[tuple[int, int, str]]:
        """Yield (stage, chunk, name there) of a parameter; tied embeddings are on two stages."""
        last = self.layout.last
        if match := LAYER.fullmatch(name):
            stage, chunk, slot = self.slots[int(match[1])]
            yield stage, chunk, f"decoder.layers.{slot}.{match[2]}"
        elif name == OUTPUT_LAYER or name.startswith("decoder."):
            yield *last, name
        else:
            yield 0, 0, name
            tied = self.config.model.share_embeddings_and_output_weights
            if name == EMBEDDING and tied and self.layout.pp > 1:
                yield *last, head_copy(self.options.names)

    def _rank_shards(
        self, name: str, local: str, tensor: Tensor, rank: Rank
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield one rank's shards of a parameter, by name in its file."""
        layout, model = self.layout, self.config.model
        layer = LAYER.fullmatch(name)
        if (of_experts := EXPERTS.fullmatch(name)) is not None:
            at, _, _ = local.partition("mlp.experts.")
            for inner, part in split_experts(
                of_experts[1],
                tensor,
                self.options.experts,
                group=layout.expert_shard(rank),
                groups=layout.expert_shards,
                rank=rank.tp % layout.expert_tp,
                parts=layout.expert_tp,
                gated=bool(model.gated_linear_unit),
            ):
                yield self._written(at + inner, layer), part
            return
        written = self._written(local, layer)
        if name in VOCABULARY_PARAMETERS:
            used = tensor[: model.vocab_size]
            yield written, vocabulary_shard(used, rank.tp, self.vocabulary_rows)
            return
        yield written, shard(tensor, self._split_of(name), rank.tp, layout.tp)

    def _split_of(self, name: str) -> Split:
        engine = self.options.names is Names.TRANSFORMER_ENGINE
        split = split_of(name, self.config, engine=engine)
        assert split is not None, f"{name} is known"
        return split

    def _written(self, local: str, layer: re.Match[str] | None) -> str:
        """Return the name in a file.

        Args:
            local: Our name, with the layer numbered within its chunk.
            layer: The match of the global name.
        """
        return theirs(
            local,
            self.options.names,
            has_experts=layer is not None and int(layer[1]) in self.sparse,
            latent=bool(self.config.model.multi_latent_attention),
        )

    def _uneven_experts(self, part: str, header: Tensor) -> str | None:
        """Return what is wrong with dividing the width of experts; None if nothing is."""
        if is_replicated(part):
            return None
        gated = part != "fc2" and self.config.model.gated_linear_unit
        rows = header.shape[2] if part == "fc2" else header.shape[1]
        width = rows // 2 if gated else rows
        if width % self.layout.expert_tp:
            return f"experts of width {width} are not divisible by tp={self.layout.expert_tp}"
        return None

    def _args(self) -> Any:
        embedding = self.source.headers[EMBEDDING]
        return make_args(
            self.config,
            self.options.layout,
            padded_rows=self.vocabulary_rows * self.layout.tp,
            params_dtype=embedding.dtype,
            transformer_impl=str(
                Names.LOCAL if self.options.names is Names.LEGACY else self.options.names
            ),
            use_mcore_models=self.options.names is not Names.LEGACY,
            use_legacy_models=self.options.names is Names.LEGACY,
            moe_grouped_gemm=self.options.experts is not ExpertNames.SEQUENTIAL,
            moe_use_legacy_grouped_gemm=(
                self.options.names is Names.TRANSFORMER_ENGINE
                and self.options.experts is ExpertNames.GROUPED
            ),
            mla_mm_split=self.options.mla_mm_split,
            iteration=max(self.source.step, 1),
        )
