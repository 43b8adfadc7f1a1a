"""Join the shards of ``mp_rank_*`` folders into full parameters, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import attrs
from torch import Tensor

from ascend_run.core.config.linear_biases import linear_biases
from ascend_run.core.hugging_face.derived_fields import model_value
from ascend_run.core.hugging_face.parameter_rows import (
    EMBEDDING,
    OUTPUT_LAYER,
    VOCABULARY_PARAMETERS,
)
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.tools.convert.differences import difference
from ascend_run.types.config import RunConfig

from .expert_shards import (
    expert_part,
    is_expert_name,
    is_replicated,
    join_experts,
    num_fc2_elements,
)
from .mp_rank_files import MpRankFiles, chunk_slots
from .parameter_shards import LAYER, Split, expected_shape, join, stored_split
from .qkv_order import FIRST_ORDERED, in_current_order, require_plain_heads
from .replicas import differing_copies
from .shard_layout import Rank

_ROUTER_BIAS: Final = "mlp.router.bias"
"""Early releases of ``megatron.legacy`` have it; it is left out where it is 0."""
Join = Callable[[Callable[[Tensor], Tensor]], Tensor]
"""Builds a full parameter from its shards, after applying a function to each."""


@attrs.frozen
class StoredModel:
    """The parameters of a checkpoint, under their global names."""

    headers: Mapping[str, Tensor]
    joins: Mapping[str, Join]

    def read(self, name: str) -> Tensor:
        """Join one parameter; a view of the file if it has a single shard."""
        return self.joins[name](_same)


def stored_model(
    files: MpRankFiles, config: RunConfig, *, tp_extend_ep: bool, first_copy: bool = False
) -> StoredModel:
    """Match the tensors of all files with the parameters of the model.

    Args:
        tp_extend_ep: Tensor-parallel ranks have experts of their own.
        first_copy: Take the first rank's copy of a replicated tensor, without comparing the others.

    Raises:
        CheckpointError: A tensor is missing on a rank, has another shape than the config says, or
            its copies differ, on other ranks or tied. Lists all problems.
    """
    reader = _Reader(files, config, tp_extend_ep or bool(files.args.get("moe_tp_extend_ep")))
    if reader.reorders:
        require_plain_heads(files.version, config)
    headers: dict[str, Tensor] = {}
    joins: dict[str, Join] = {}
    problems: list[str] = []
    copies: list[str] = []
    for name, stage, chunk, local in reader.names():
        try:
            joins[name] = join_one = reader.join_of(name, stage, chunk, local)
            headers[name] = reader.header_of(name, join_one)
            if not first_copy:
                copies += differing_copies(
                    name, files, chunk, reader.copies(name, stage, chunk, local)
                )
        except (CheckpointError, RuntimeError) as problem:
            problems.append(f"{name}: {problem}")
    problems += reader.remove_tied_copy(headers, joins)
    if problems:
        raise CheckpointError(f"{files.folder} does not match this model", problems)
    if copies:
        raise CheckpointError(
            f"{files.folder} has replicated tensors whose copies differ; save it again, or take "
            "the first rank's with --first-copy",
            [*dict.fromkeys(copies)],
        )
    return StoredModel(headers, joins)


@attrs.frozen
class _Reader:
    files: MpRankFiles
    config: RunConfig
    tp_extend_ep: bool

    @property
    def reorders(self) -> bool:
        return self.files.legacy and self.files.version < FIRST_ORDERED

    def names(self) -> Iterator[tuple[str, int, int, str]]:
        """Yield (global name, stage, chunk, name in the file) of each parameter, in model order."""
        number, has_router_bias = 0, linear_biases(self.config.model).router
        for stage, chunk, slots in chunk_slots(self.files):
            numbers = {slot: number + n for n, slot in enumerate(slots)}
            number += len(slots)
            seen: set[str] = set()
            for local in self._first(stage)[chunk]:
                match = LAYER.fullmatch(local)
                if match is None:
                    yield local, stage, chunk, local
                    continue
                at = f"decoder.layers.{numbers[int(match[1])]}."
                inner = match[2]
                unused = inner == _ROUTER_BIAS and not has_router_bias
                if unused and not self._first(stage)[chunk][local].any():
                    continue
                if not is_expert_name(inner):
                    yield at + inner, stage, chunk, local
                    continue
                for part in ("fc1", "fc2", expert_part(inner)):
                    if part and (name := f"{at}mlp.experts.{part}") not in seen:
                        seen.add(name)
                        yield name, stage, chunk, local

    def join_of(self, name: str, stage: int, chunk: int, local: str) -> Join:
        """Return a function that reads a full parameter."""
        match = LAYER.fullmatch(local)
        if match is not None and is_expert_name(match[2]):
            part = name.rpartition(".")[2]
            held = self._held_experts(stage, chunk, int(match[1]))
            return lambda convert: self._experts(part, held, convert)
        shards = []
        for tp in range(self.files.tp):
            rank = next(r for r in sorted(self.files.ranks) if (r.tp, r.pp) == (tp, stage))
            if (tensor := self.files.ranks[rank][chunk].get(local)) is None:
                raise CheckpointError(f"missing on tensor-parallel rank {tp}")
            shards.append(tensor)
        if len({(tuple(part.shape), part.dtype) for part in shards}) > 1:
            found = ", ".join(f"{part.dtype} {list(part.shape)}" for part in shards)
            raise CheckpointError(f"its shards differ in shape or dtype: {found}")
        split = stored_split(name, _rows(shards[0]), self.config)
        if split is None:
            raise CheckpointError("no parameter of a GPTModel that can be converted")
        reorder = self.reorders and ".linear_qkv." in name

        def joined(convert: Callable[[Tensor], Tensor]) -> Tensor:
            held = [convert(part) for part in shards]
            if reorder:
                held = [in_current_order(part, self.files.version, self.config) for part in held]
            return self._joined(name, held, split)

        return joined

    def copies(
        self, name: str, stage: int, chunk: int, local: str
    ) -> Iterator[tuple[str, list[Rank]]]:
        """Yield (name in the files, ranks that have copies) of the tensors of a parameter."""
        ranks = sorted(rank for rank in self.files.ranks if rank.pp == stage)
        match = LAYER.fullmatch(local)
        if match is None or not is_expert_name(match[2]):
            held_by_first = self.files.ranks[ranks[0]][chunk][local]
            whole = stored_split(name, _rows(held_by_first), self.config) is Split.NONE
            for tp in range(1 if whole else self.files.tp):
                yield local, [rank for rank in ranks if whole or rank.tp == tp]
            return
        for ep in range(0 if self.tp_extend_ep else self.files.ep):
            held = [rank for rank in ranks if rank.ep == ep]
            tensors: list[Mapping[str, Tensor]] = [
                _inner_experts(self.files.ranks[rank][chunk], int(match[1])) for rank in held
            ]
            part_name = name.rpartition(".")[2]
            parts = 1 if is_replicated(part_name) else self._expert_tp(tensors)
            if len(held) == parts:
                continue
            for inner in (n for n in tensors[0] if expert_part(n) == part_name):
                for part in range(parts):
                    yield f"decoder.layers.{match[1]}.{inner}", held[part::parts]

    def header_of(self, name: str, read: Join) -> Tensor:
        """Return the shape and dtype of a parameter.

        Raises:
            CheckpointError: The shape is not the config's.
        """
        joined = read(_without_data)
        wanted = expected_shape(name, self.config)
        if wanted is not None and tuple(joined.shape) != wanted:
            raise CheckpointError(f"{list(joined.shape)}, expected {list(wanted)}")
        return joined

    def remove_tied_copy(self, headers: dict[str, Tensor], joins: dict[str, Join]) -> list[str]:
        """Remove the last stage's copy of tied embeddings; return a message if it differs."""
        tied = self.config.model.share_embeddings_and_output_weights
        if not tied or OUTPUT_LAYER not in joins or EMBEDDING not in joins:
            return []
        headers.pop(OUTPUT_LAYER)
        copy = joins.pop(OUTPUT_LAYER)
        found = difference(copy(_same), joins[EMBEDDING](_same))
        if found is None:
            return []
        return [
            f"{OUTPUT_LAYER} differs from {EMBEDDING}, though the model ties them: {found.text}"
        ]

    def _joined(self, name: str, shards: list[Tensor], split: Split) -> Tensor:
        if name not in VOCABULARY_PARAMETERS:
            return join(shards, split)
        rows = self.config.model.vocab_size
        return join(shards, Split.ROWS)[:rows]

    def _first(self, stage: int) -> tuple[Mapping[str, Tensor], ...]:
        return self.files.ranks[min(rank for rank in self.files.ranks if rank.pp == stage)]

    def _held_experts(self, stage: int, chunk: int, slot: int) -> list[list[Mapping[str, Tensor]]]:
        """Return the tensors of a layer's experts: group of experts -> shard -> by name."""
        held: list[list[Mapping[str, Tensor]]] = []
        for ep in range(self.files.ep):
            ranks = sorted(r for r in self.files.ranks if (r.pp, r.ep) == (stage, ep))
            tensors: list[Mapping[str, Tensor]] = [
                _inner_experts(self.files.ranks[rank][chunk], slot) for rank in ranks
            ]
            if self.tp_extend_ep:
                held += [[one] for one in tensors]
            else:
                held.append(tensors[: self._expert_tp(tensors)])
        return held

    def _experts(
        self,
        part: str,
        held: list[list[Mapping[str, Tensor]]],
        convert: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Read a part of all experts of a layer: ``fc1``, ``fc2``, or bias of either."""
        model = self.config.model
        stacked = join_experts(
            part,
            [[{n: convert(t) for n, t in one.items()} for one in group] for group in held],
            hidden=model.hidden_size,
            width=model_value(self.config, "moe_ffn_hidden_size"),
            gated=bool(model.gated_linear_unit),
        )
        if len(stacked) != model.num_moe_experts:
            raise CheckpointError(f"{len(stacked)} experts, expected {model.num_moe_experts}")
        return stacked

    def _expert_tp(self, tensors: list[Mapping[str, Tensor]]) -> int:
        """Return into how many shards experts are divided, from the sizes of the tensors."""
        model = self.config.model
        width = model_value(self.config, "moe_ffn_hidden_size")
        held = num_fc2_elements(tensors[0])
        whole: int = (model.num_moe_experts or 0) // self.files.ep * width * model.hidden_size
        if not held or whole % held or whole // held > len(tensors):
            raise CheckpointError(
                f"{held} elements of fc2 on a rank; {whole} of its experts cannot be divided like "
                "that over its tensor-parallel ranks"
            )
        return whole // held


def _inner_experts(chunk: Mapping[str, Tensor], slot: int) -> dict[str, Tensor]:
    prefix = f"decoder.layers.{slot}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in chunk.items()
        if name.startswith(f"{prefix}mlp.experts.")
    }


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _without_data(tensor: Tensor) -> Tensor:
    return tensor.to("meta")
