"""Links around a layer and its parts, which measure them and do what is chosen."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ascend_run.ops.swapping.call import Call
from ascend_run.ops.swapping.swapper import Swapper
from ascend_run.plugin_api import Forward, ForwardLink
from ascend_run.plugins.memory import discarding, reading, recomputing

from .layer import Handle, Layer
from .recorder import Mode, Recorder, unpacked
from .treatment import PARTS, READERS, WHOLE


def links_of(layer: Layer, recorder: Recorder, swapper: Swapper | None) -> dict[str, ForwardLink]:
    """Return the links of a layer, which the recorder then knows."""
    recorder.layers.append(layer)
    waiting: dict[str, list[Any]] = {reader: [] for reader in READERS.values()}
    own = (part for part in PARTS if isinstance(getattr(layer.module, part, None), nn.Module))
    wraps = {
        name: partial(_wrapped, layer, recorder, swapper, waiting, name) for name in (WHOLE, *own)
    }
    return {name: ForwardLink(wrap=wrap, compilable=False) for name, wrap in wraps.items()}


def _wrapped(
    layer: Layer,
    recorder: Recorder,
    swapper: Swapper | None,
    waiting: dict[str, list[Any]],
    name: str,
    inner: Forward,
) -> Forward:
    reader = READERS.get(name)
    again = discarding(waiting[reader], inner) if reader else recomputing(inner)
    away = inner if swapper is None else _swapping(layer, recorder, swapper, name, inner)

    def forward(*args: Any, **kwargs: Any) -> Any:
        chosen = layer.chosen
        run = again if name in chosen.recomputed else away if name in chosen.swapped else inner
        if torch.is_grad_enabled():
            if name == WHOLE and recorder.mode is not Mode.NOTHING:
                return recorder.layer(layer, run, *args, **kwargs)
            if recorder.mode is Mode.PARTS:
                return recorder.part(name, run, *args, **kwargs)
        return run(*args, **kwargs)

    return reading(waiting[name], forward) if name in waiting else forward


def _swapping(
    layer: Layer, recorder: Recorder, swapper: Swapper, name: str, inner: Forward
) -> Forward:
    """Return the forward whose saved tensors are swapped; the recorder sees what cannot leave."""
    module = layer.module.get_submodule(name)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        parts = layer.chosen.swapped
        begins, ends = name == parts[0], name == parts[-1]
        call = swapper.joined(module, layer.place, args, kwargs, begins=begins, ends=ends)

        def pack(tensor: Tensor) -> Any:
            saved = call.pack(tensor)
            return recorder.packed(saved) if isinstance(saved, Tensor) else saved

        with saved_tensors_hooks(pack, _back):
            return inner(*args, **kwargs)

    return forward


def _back(saved: Any) -> Tensor:
    return unpacked(saved) if isinstance(saved, Handle) else Call.unpack(saved)
