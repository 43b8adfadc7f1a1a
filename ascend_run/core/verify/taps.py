"""Summaries of what goes into and comes out of every module, forward and backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ascend_run.core.checkpoint.regions import unwrapped
from ascend_run.core.model.places import named_by_number
from ascend_run.plugin_api import contracts as c

from .moments import Moments, summary
from .record import Record

ROOT: Final = "model"
"""Name of the whole model among its modules."""
BLOCK: Final = "decoder"
"""Of each chunk; the first one's input and the last one's output are the whole model's."""
_LAYER: Final = re.compile(r"(^|\.)decoder\.layers\.(\d+)(?=\.|$)")


@contextmanager
def tapped(
    bundle: c.ModelBundle, groups: Any, dp: tuple[int, int], record: Record
) -> Iterator[None]:
    """Fill ``record.forward`` and ``record.backward`` from the one forward and backward inside.

    Args:
        dp: This rank among the data-parallel ones, and their number.
    """
    handles: list[Any] = []
    pp_rank, pp_size = groups.pp.rank(), groups.pp.size()
    try:
        for vp_stage, chunk in enumerate(bundle.chunks):
            place = vp_stage * pp_size + pp_rank
            tap = _ChunkTap(
                dp, record.forward.setdefault(place, {}), record.backward.setdefault(place, {})
            )
            handles += tap.attach(unwrapped(chunk), bundle.transformer_config, pp_rank)
        yield
    finally:
        for handle in handles:
            handle.remove()


class _ChunkTap:
    """One pipeline chunk of this rank. It sees micro-batches one after the other, forward and
    backward, whatever the schedule does between."""

    def __init__(
        self, dp: tuple[int, int], forward: dict[str, Moments], backward: dict[str, Moments]
    ) -> None:
        self._dp_rank, self._dp_size = dp
        self._forward, self._backward = forward, backward
        self._begun = self._ended = -1

    def attach(self, model: Any, config: Any, pp_rank: int) -> list[Any]:
        offset = get_transformer_layer_offset(config, getattr(model, "vp_stage", None), pp_rank)
        # Before all other hooks, as it counts the micro-batches.
        handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for local_name, module in model.named_modules():
            name = ROOT if not local_name else whole_name(local_name, model, offset)
            handles.append(
                module.register_forward_pre_hook(self._before(name, model), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(self._after(name, model)))
        return handles

    def _begin(self, *_: Any) -> None:
        if not _in_backward():
            self._begun += 1

    def _before(self, name: str, model: Any) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            if name == BLOCK and not model.pre_process:
                return  # what the chunk before has sent
            named = [(str(i), x) for i, x in enumerate(_tensors(args))]
            for key, value in sorted((kwargs or {}).items()):
                named += [(key, x) for x in _tensors(value)]
            if name == ROOT:
                named += _at_positions(dict(named))
            for which, tensor in named:
                self._see(f"{name}|in|{which}", tensor)

        return hook

    def _after(self, name: str, model: Any) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if name in (ROOT, BLOCK) and not model.post_process:
                return  # what the next chunk is sent
            for i, tensor in enumerate(_tensors(output)):
                self._see(f"{name}|out|{i}", tensor)

        return hook

    def _see(self, key: str, tensor: Tensor) -> None:
        recomputes = _in_backward()
        if not recomputes:
            _add(self._forward, key, self._number(self._begun), tensor)
        if not tensor.requires_grad:
            return
        if key.startswith(f"{ROOT}|out"):
            tensor.register_hook(self._note_backward)
        micro_batch = None if recomputes else self._begun

        def hook(gradient: Tensor) -> None:
            seen = self._ended if micro_batch is None else micro_batch
            _add(self._backward, key, self._number(seen), gradient)

        tensor.register_hook(hook)

    def _note_backward(self, gradient: Tensor) -> None:
        self._ended += 1

    def _number(self, micro_batch: int) -> int:
        """Of a micro-batch in the global batch, whichever rank it fell to."""
        return micro_batch * self._dp_size + self._dp_rank


def whole_name(local_name: str, model: Any, offset: int) -> str:
    """A module's name with its layer's number in the whole model."""

    def shifted(match: re.Match[str]) -> str:
        return f"{match[1]}decoder.layers.{int(match[2]) + offset}"

    return named_by_number(f"{_LAYER.sub(shifted, local_name)}.", model)[:-1]


def _at_positions(batch: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Every field times its positions: moments alone would not see tokens change their places."""
    positions = batch.get("position_ids")
    if positions is None:
        return []
    return [
        (f"{name} by position", field.detach() * (positions + 1))
        for name, field in batch.items()
        if field.shape == positions.shape and name != "position_ids"
    ]


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _add(seen: dict[str, Moments], key: str, micro_batch: int, tensor: Tensor) -> None:
    moments = seen.setdefault(key, Moments())
    row = summary(tensor)
    known = moments.rows.get(micro_batch)
    moments.rows[micro_batch] = (
        row if known is None else [a + b for a, b in zip(known, row, strict=True)]
    )
