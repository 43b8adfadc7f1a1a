"""Record moments of the inputs and outputs of every module, in forward and backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ascend_run.core.checkpoint.regions import unwrapped
from ascend_run.core.model.forward_chain import linked
from ascend_run.core.model.layer_slots import named_by_number
from ascend_run.plugin_api import ForwardLink, LinkPlace
from ascend_run.plugin_api import contracts as c
from ascend_run.types.forward import Forward, NamedLink

from .moments import Moments, summary
from .record import Record

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

ROOT: Final = "model"
"""Name of the model itself among its modules."""
BLOCK: Final = "decoder"
"""Name of each chunk's decoder; only the first one's input and the last one's output are recorded,
which are those of the whole model."""
_LAYER: Final = re.compile(r"(^|\.)decoder\.layers\.(\d+)(?=\.|$)")


@contextmanager
def tapped(
    bundle: c.ModelBundle, groups: ProcessGroupCollection, dp: tuple[int, int], record: Record
) -> Iterator[None]:
    """Fill ``record.forward`` and ``record.backward`` during one forward and backward.

    Args:
        dp: Data-parallel rank and size.
    """
    links: dict[nn.Module, NamedLink] = {}
    pp_rank, pp_size = groups.pp.rank(), groups.pp.size()
    for vp_stage, chunk in enumerate(bundle.chunks):
        index = vp_stage * pp_size + pp_rank
        tap = _ChunkTap(
            dp, record.forward.setdefault(index, {}), record.backward.setdefault(index, {})
        )
        links |= tap.links(unwrapped(chunk), bundle.transformer_config, pp_rank)
    with linked(links):
        yield


class _ChunkTap:
    """Taps of one pipeline chunk. Any schedule runs the forwards of a chunk in the order of its
    micro-batches, and likewise the backwards."""

    def __init__(
        self, dp: tuple[int, int], forward: dict[str, Moments], backward: dict[str, Moments]
    ) -> None:
        self._dp_rank, self._dp_size = dp
        self._forward, self._backward = forward, backward
        self._begun = self._ended = -1
        self._runs_forward = False

    def links(
        self, model: nn.Module, config: TransformerConfig, pp_rank: int
    ) -> dict[nn.Module, NamedLink]:
        """Return links around the forward of every module, outside of the run's own links."""
        links = {}
        for name, module in named_modules(model, config, pp_rank):
            # Compilable, so that compiled modules stay compiled, with graph breaks at the taps.
            link = ForwardLink(wrap=partial(self._tapping, name, model), compilable=True)
            links[module] = NamedLink(name="verify", place=LinkPlace.AROUND, link=link)
        return links

    def _tapping(self, name: str, model: nn.Module, inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if name != ROOT:
                return tapped(*args, **kwargs)
            if not in_backward():
                self._begun += 1
            self._runs_forward = True
            try:
                return tapped(*args, **kwargs)
            finally:
                self._runs_forward = False

        def tapped(*args: Any, **kwargs: Any) -> Any:
            if name != BLOCK or model.pre_process:  # else it is the previous chunk's output
                self._see_inputs(name, args, kwargs)
            output = inner(*args, **kwargs)
            if name not in (ROOT, BLOCK) or model.post_process:  # else it is the next one's input
                for i, tensor in enumerate(_tensors(output)):
                    self._see(f"{name}|out|{i}", tensor)
            return output

        return forward

    def _see_inputs(self, name: str, args: Any, kwargs: Any) -> None:
        named = [(str(i), x) for i, x in enumerate(_tensors(args))]
        for key, value in sorted(kwargs.items()):
            named += [(key, x) for x in _tensors(value)]
        if name == ROOT:
            named += _at_positions(dict(named))
        for which, tensor in named:
            self._see(f"{name}|in|{which}", tensor)

    def _see(self, key: str, tensor: Tensor) -> None:
        recomputes = in_backward() or not self._runs_forward  # some recompute before the backward
        if not recomputes:
            _add(self._forward, key, self._number(self._begun), tensor)
        if not tensor.requires_grad:
            return
        if key.startswith(f"{ROOT}|out"):
            _on_gradient(tensor, self._note_backward)
        micro_batch = None if recomputes else self._begun

        def hook(gradient: Tensor) -> None:
            seen = self._ended if micro_batch is None else micro_batch
            _add(self._backward, key, self._number(seen), gradient)

        _on_gradient(tensor, hook)

    def _note_backward(self, gradient: Tensor) -> None:
        self._ended += 1

    def _number(self, micro_batch: int) -> int:
        """Index in the global batch of one of this rank's micro-batches."""
        return micro_batch * self._dp_size + self._dp_rank


def named_modules(
    model: nn.Module, config: TransformerConfig, pp_rank: int
) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules of a chunk with their names in the whole model; ``ROOT`` for itself."""
    offset = get_transformer_layer_offset(config, getattr(model, "vp_stage", None), pp_rank)
    for local_name, module in model.named_modules():
        yield whole_name(local_name, model, offset) if local_name else ROOT, module


def whole_name(local_name: str, model: nn.Module, offset: int) -> str:
    """Return a module's name with its layer's number in the whole model."""

    def shifted(match: re.Match[str]) -> str:
        return f"{match[1]}decoder.layers.{int(match[2]) + offset}"

    return named_by_number(f"{_LAYER.sub(shifted, local_name)}.", model)[:-1]


def _at_positions(batch: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Each field times the positions; moments alone do not change if tokens are permuted."""
    positions = batch.get("position_ids")
    if positions is None:
        return []
    return [
        (f"{name} by position", field.detach() * (positions + 1))
        for name, field in batch.items()
        if field.shape == positions.shape and name != "position_ids"
    ]


def in_backward() -> bool:
    """Return whether autograd runs a backward."""
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


def _on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    register: Callable[[Callable[[Tensor], None]], object] = tensor.register_hook
    register(hook)
