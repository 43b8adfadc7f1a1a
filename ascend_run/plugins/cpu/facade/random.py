"""Rows on random numbers: a device generator apart from the CPU's.

Megatron keeps several streams of device randomness (one the tensor-parallel ranks share, one each
has for itself) by swapping the device generator's state, and warns where the CPU's own changes
meanwhile. So what an accelerator draws on the device is drawn here from a generator of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .substitution import Substitute, original


class DeviceRandom:
    """The generator that is used as the device's."""

    def __init__(self) -> None:
        self.generator = torch.Generator(device="cpu")

    def __getitem__(self, _device: Any) -> torch.Generator:
        """``torch.cuda.default_generators[device]``: one device, whatever its index."""
        return self.generator

    def __len__(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(int(seed))

    def seed(self) -> None:
        self.generator.seed()

    def initial_seed(self) -> int:
        return self.generator.initial_seed()

    def get_state(self, device: Any = "cuda") -> Tensor:
        return self.generator.get_state()

    def set_state(self, new_state: Tensor, device: Any = "cuda") -> None:
        self.generator.set_state(new_state)

    def get_states(self) -> list[Tensor]:
        return [self.generator.get_state()]

    def set_states(self, new_states: Sequence[Tensor]) -> None:
        for state in new_states:
            self.generator.set_state(state)


class _DropoutFunction(torch.autograd.Function):
    """``x * mask`` with the mask drawn from a given generator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float, generator: torch.Generator) -> Tensor:
        keep = 1.0 - probability
        mask = torch.empty_like(x).bernoulli_(keep, generator=generator)
        if keep:  # everything is dropped otherwise: the mask is zero already
            mask.div_(keep)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return dout * mask, None, None


def device_dropout(random: DeviceRandom) -> Callable[..., Tensor]:
    """``torch.nn.functional.dropout`` that draws from the device generator."""

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or p == 0.0:
            return x
        out = _DropoutFunction.apply(x, p, random.generator)
        return x.copy_(out) if inplace else out

    return dropout


_INITIALISERS = (
    ("_no_grad_normal_", 3),
    ("_no_grad_uniform_", 3),
    ("_no_grad_trunc_normal_", 5),
)


def random_substitutes(random: DeviceRandom) -> tuple[Substitute, ...]:
    """The rows; all of them share one generator."""
    functions: dict[str, Any] = {
        "manual_seed": random.manual_seed,
        "manual_seed_all": random.manual_seed,
        "seed": random.seed,
        "seed_all": random.seed,
        "initial_seed": random.initial_seed,
        "get_rng_state": random.get_state,
        "set_rng_state": random.set_state,
        "get_rng_state_all": random.get_states,
        "set_rng_state_all": random.set_states,
    }
    checkpoint = "torch's own checkpoint restores the device's randomness before it recomputes"
    why = "Megatron's RNG tracker; torch.manual_seed seeds the device too"
    return (
        *(
            Substitute(f"{module}:{name}", new, why)
            for module in ("torch.cuda", "torch.cuda.random")
            for name, new in functions.items()
        ),
        Substitute("torch.cuda:default_generators", random, "Megatron sets states through it"),
        Substitute("torch.cuda:_initialized", True, checkpoint),
        Substitute("torch.utils.checkpoint:_infer_device_type", lambda *_: "cuda", checkpoint),
        Substitute(
            "torch.utils.checkpoint:get_device_states",
            lambda *_: ([0], random.get_states()),
            checkpoint,
        ),
        Substitute(
            "torch.nn.functional:dropout",
            device_dropout(random),
            "draws on the device, in Megatron's tracked streams",
        ),
        *(
            Substitute(
                f"torch.nn.init:{name}",
                _initialiser(f"torch.nn.init:{name}", num_arguments, random),
                "Megatron initialises weights on the device, inside a tracked stream",
            )
            for name, num_arguments in _INITIALISERS
        ),
    )


def _initialiser(target: str, num_arguments: int, random: DeviceRandom) -> Any:
    """An initialiser whose last argument, the generator, defaults to the device's."""
    inner = original(target)

    def initialise(*args: Any, generator: torch.Generator | None = None) -> Tensor:
        if len(args) > num_arguments:
            *args, generator = args  # type: ignore[assignment]
        return inner(*args, generator=random.generator if generator is None else generator)

    return initialise
