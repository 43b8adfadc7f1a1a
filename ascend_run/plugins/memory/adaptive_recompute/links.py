"""Links around a layer and its parts, which measure them and recompute what is chosen."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ascend_run.plugin_api import Forward, ForwardLink
from ascend_run.plugins.memory import discarding, reading, recomputing

from .recorder import PARTS, READERS, Layer, Mode, Recorder


def links_of(module: nn.Module, recorder: Recorder) -> dict[str, ForwardLink]:
    """Return the links of a layer, which the recorder then knows."""
    layer = Layer(module)
    recorder.layers.append(layer)
    waiting: dict[str, list[Any]] = {reader: [] for reader in READERS.values()}
    names = ["", *(part for part in PARTS if isinstance(getattr(module, part, None), nn.Module))]
    wraps = {name: partial(_wrapped, layer, recorder, waiting, name) for name in names}
    return {name: ForwardLink(wrap=wrap, compilable=False) for name, wrap in wraps.items()}


def _wrapped(
    layer: Layer, recorder: Recorder, waiting: dict[str, list[Any]], name: str, inner: Forward
) -> Forward:
    reader = READERS.get(name)
    treated = discarding(waiting[reader], inner) if reader else recomputing(inner)

    def forward(*args: Any, **kwargs: Any) -> Any:
        run = treated if name in layer.chosen else inner
        if torch.is_grad_enabled():
            if not name and recorder.mode is not Mode.NOTHING:
                return recorder.layer(layer, run, *args, **kwargs)
            if recorder.mode is Mode.PARTS:
                return recorder.part(name, run, *args, **kwargs)
        return run(*args, **kwargs)

    return reading(waiting[name], forward) if name in waiting else forward
