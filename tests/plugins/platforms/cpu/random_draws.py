"""Functions of torch and Megatron that draw random numbers, and a rank that calls them in
Megatron's RNG forks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import init

from .megatron_training import megatron_on_the_cpu

SEED: Final = 7


def _random_logits() -> Tensor:
    from megatron.core.transformer.moe.moe_utils import apply_random_logits

    return apply_random_logits(torch.zeros(4, 4))


DRAWS: Final[Mapping[str, Callable[[], Tensor]]] = {
    "kaiming_uniform_": lambda: init.kaiming_uniform_(torch.empty(4, 4)),
    "xavier_normal_": lambda: init.xavier_normal_(torch.empty(4, 4)),
    "orthogonal_": lambda: init.orthogonal_(torch.empty(4, 4)),
    "normal_": lambda: init.normal_(torch.empty(16)),
    "uniform_": lambda: init.uniform_(torch.empty(16)),
    "trunc_normal_": lambda: init.trunc_normal_(torch.empty(16)),
    "Tensor.normal_": lambda: torch.empty(16).normal_(),
    "Tensor.exponential_": lambda: torch.empty(16).exponential_(),
    "Tensor.bernoulli_": lambda: torch.empty(64).bernoulli_(),
    "rand": lambda: torch.rand(16),
    "randn_like": lambda: torch.randn_like(torch.empty(16)),
    "randint": lambda: torch.randint(2**40, (4,)),
    "randperm": lambda: torch.randperm(64),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(64), 16),
    "Linear": lambda: nn.Linear(4, 4).weight.detach(),
    "Dropout": lambda: nn.Dropout()(torch.ones(64)),
    "dropout1d": lambda: F.dropout1d(torch.ones(64, 1)),
    "attention-dropout": lambda: F.scaled_dot_product_attention(
        *torch.ones(3, 1, 1, 8, 8), dropout_p=0.5
    ),
}

Drawn = Mapping[str, Mapping[str, Tensor]]
"""Fork -> function -> its numbers."""


def draw_on_a_rank(**sizes: int) -> Drawn:
    """Return this rank's draws of every kind in each of Megatron's forks, and a dropout outside."""
    with megatron_on_the_cpu():
        return _draw(sizes)


def _draw(sizes: Mapping[str, Any]) -> Drawn:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    torch.manual_seed(SEED)
    random.model_parallel_cuda_manual_seed(SEED)
    tracker = random.get_cuda_rng_tracker()
    forks = {"expert": random.get_expert_parallel_rng_tracker_name(), "model": None}
    drawn: dict[str, dict[str, Tensor]] = {}
    for fork, stream in forks.items():
        drawn[fork] = {}
        for name, draw in DRAWS.items():
            with tracker.fork(*[stream] if stream else []):
                drawn[fork][name] = draw()
    drawn["routing"] = {"RandomSTE": _random_logits()}
    torch.rand(1 + parallel_state.get_tensor_model_parallel_rank())  # as for a rank's own data
    drawn["none"] = {"Dropout": DRAWS["Dropout"]()}
    return drawn
