"""A minimal replacement of ``torch.cuda`` with which Megatron's local spec runs on one CPU rank.

Used for the peer only: it has no TorchFunctionMode and no overhead in a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def single_rank_megatron() -> Iterator[None]:
    """Set up a process group of one rank, Megatron's parallel state, and the names that it uses."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    # One function each, since torch.compile has a rule for every function of torch.cuda.
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_: None
    cuda.empty_cache = lambda: None
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda call, **_: call()
    cuda.default_generators = [torch.Generator()]
    cuda.get_rng_state = lambda *_: cuda.default_generators[0].get_state()
    cuda.set_rng_state = lambda state, *_: cuda.default_generators[0].set_state(state)
    cuda.manual_seed = lambda seed: cuda.default_generators[0].manual_seed(seed)

    import megatron.core.utils as utils
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random
    from packaging.version import Version

    utils._te_version = Version("0.0.0")  # without Transformer Engine the check raises TypeError
    utils._fa_version = Version("0.0.0")
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: cuda.set_rng_state(state)
    megatron_random._get_cuda_rng_state = lambda *_, **__: cuda.get_rng_state()
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    megatron_random.model_parallel_cuda_manual_seed(1)
    yield
