"""Weights of frozen models that differ from those of the trained one."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from ascend_run.plugin_api import contracts as c


@torch.no_grad()
def set_other_weights(bundle: c.ModelBundle, vocab_size: int) -> None:
    """Add noise to every parameter of a model.

    A model that begins with the trained one's weights computes what that one computes, which hides
    that it is skipped, or that the trained one runs in its place.

    The noise depends on the name and the index in the full tensor, not on the layout. Its standard
    deviation is half of the initial weights', and parameters that are constant at first get it too.
    """
    from .parameter_shards import parameter_shards

    scale = 0.5 * bundle.transformer_config.init_method_std
    for shard in parameter_shards(bundle.chunks, vocab_size, Tensor.detach):
        if not shard.is_parameter:
            continue
        assert shard.tensor is not None
        seed = zlib.crc32(f"{bundle.role} {shard.name}".encode())
        generator = torch.Generator().manual_seed(seed)
        noise = torch.empty(shard.global_shape).normal_(0.0, scale, generator=generator)
        sizes = zip(shard.offset, shard.tensor.shape, strict=True)
        part = noise[tuple(slice(start, start + size) for start, size in sizes)]
        shard.tensor.add_(part.to(shard.tensor))
