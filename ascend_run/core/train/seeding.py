"""Seed the random generators of a rank."""

from __future__ import annotations

import random

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from ascend_run.core.checkpoint.entries import DeviceGenerator, RandomState
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

_STAGE_SEED_STRIDE = 2**20
"""Seed stride between pipeline stages. Must exceed Megatron's own offsets.

Megatron adds 100 per expert-parallel rank to the seed, and less per rank of other axes. Its own
stride of 100 per pipeline stage would therefore give an expert of one stage the seed of another
expert of the next stage.
"""


def seed_everything(config: RunConfig, layout: Layout) -> None:
    """Seed all random generators, differently for each pipeline stage.

    Megatron's device generators also differ between tensor-parallel and expert-parallel ranks.
    """
    seed = config.run.seed + _STAGE_SEED_STRIDE * layout.coordinate("pp")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def random_state() -> RandomState:
    """Return the reader and writer of the state of all these generators."""
    device = DeviceGenerator(torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    return RandomState(device, get_cuda_rng_tracker())
