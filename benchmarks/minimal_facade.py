"""A minimal replacement of ``torch.cuda`` with which Megatron's local spec runs on the CPU.

Used for the peer only: it has no TorchFunctionMode and no overhead in a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def megatron_on_the_cpu() -> Iterator[None]:
    """Set up Megatron's parallel state, and the names that it uses.

    Experts are distributed over all ranks; without a process group there is one rank.
    """
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    # One function each, since torch.compile has a rule for every function of torch.cuda.
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_: None
    cuda.empty_cache = lambda: None
    # Its dispatchers compare streams, and wait for events on them.
    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(record_event=lambda: event)
    cuda.Stream = cuda.current_stream = lambda *_: stream
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda call, **_: call()
    cuda.default_generators = [torch.Generator()]
    cuda.get_rng_state = lambda *_: cuda.default_generators[0].get_state()
    cuda.set_rng_state = lambda state, *_: cuda.default_generators[0].set_state(state)
    cuda.manual_seed = lambda seed: cuda.default_generators[0].manual_seed(seed)

    import megatron.core.utils as utils
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from packaging.version import Version

    utils._te_version = Version("0.0.0")  # without Transformer Engine the check raises TypeError
    utils._fa_version = Version("0.0.0")
    dispatcher: Any = token_dispatcher  # a collective's sizes are a tensor where it moves nothing
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    vars(moe_utils).setdefault("te_general_gemm")  # its router reads the name without the engine
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: cuda.set_rng_state(state)
    megatron_random._get_cuda_rng_state = lambda *_, **__: cuda.get_rng_state()
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
        )
    megatron_random.model_parallel_cuda_manual_seed(1)
    yield
