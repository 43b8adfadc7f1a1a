"""Rows for random numbers: a device generator separate from the CPU's.

Megatron keeps several streams of device randomness (one shared by the tensor-parallel ranks, one
private to each) and selects a stream by setting the device generator's state. Here host and device
draw on the same kind of tensor, so the calling code decides which generator is used. Inside a fork,
and in every dropout, torch's default generator holds the device's state and the device's generator
holds the host's, so that every function of torch draws as it would on the device. Elsewhere the two
are separate, as on an accelerator: what a rank draws for its data does not affect the device's
random numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ascend_run.plugin_api import Patch

from .rows import row

_MEGATRON: Final = "megatron.core.tensor_parallel.random"


class DeviceRandom:
    """The device's random generator: separate from the default one, or swapped with it."""

    def __init__(self) -> None:
        self._apart = torch.Generator(device="cpu")
        self.draws = False
        """Whether draws without an explicit generator use the device's state."""

    @property
    def generator(self) -> torch.Generator:
        """The generator that currently holds the device's state."""
        return torch.default_generator if self.draws else self._apart

    @contextlib.contextmanager
    def drawn(self, draws: bool = True) -> Iterator[None]:
        """Make draws without an explicit generator use the device's state inside this context."""
        before = self.draws
        self.set_draws(draws)
        try:
            yield
        finally:
            self.set_draws(before)

    def set_draws(self, draws: bool) -> None:
        if draws is not self.draws:
            state = torch.default_generator.get_state()
            torch.default_generator.set_state(self._apart.get_state())
            self._apart.set_state(state)
            self.draws = draws

    def __getitem__(self, _device: object) -> torch.Generator:
        """Return ``torch.cuda.default_generators[device]``: one device, for any index."""
        return self.generator

    def __len__(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(int(seed))

    def seed(self) -> None:
        self.generator.seed()

    def initial_seed(self) -> int:
        return self.generator.initial_seed()

    def get_state(self, device: object = "cuda") -> Tensor:
        return self.generator.get_state()

    def set_state(self, new_state: Tensor, device: object = "cuda") -> None:
        self.generator.set_state(new_state)

    def get_states(self) -> list[Tensor]:
        return [self.generator.get_state()]

    def set_states(self, new_states: Sequence[Tensor]) -> None:
        for state in new_states:
            self.generator.set_state(state)


def _device_dropout(plain: Any, random: DeviceRandom) -> Callable[..., Tensor]:
    """Wrap ``torch.nn.functional.dropout`` so that it draws from the device's generator."""

    @functools.wraps(plain)
    def dropout(*args: Any, **kwargs: Any) -> Tensor:
        with random.drawn():
            out: Tensor = plain(*args, **kwargs)
            return out

    return dropout


def _device_fork(plain: Any, random: DeviceRandom) -> Callable[..., Any]:
    """Wrap ``CudaRNGStatesTracker.fork`` so that every function of torch draws from the device.

    Megatron's own code, which warns if the host's state has changed, sees the two generators as
    separate, also in nested forks.
    """

    @functools.wraps(plain)
    @contextlib.contextmanager
    def fork(*args: Any, **kwargs: Any) -> Iterator[None]:
        with random.drawn(False), plain(*args, **kwargs), random.drawn():
            yield

    return fork


def _states_with_draws(plain: Any, random: DeviceRandom) -> Callable[[], tuple[Any, ...]]:
    """Wrap Megatron's ``_get_all_rng_states``: also returns whether torch draws on the device."""

    @functools.wraps(plain)
    def states() -> tuple[Any, ...]:
        draws = random.draws
        with random.drawn(False):
            return (*plain(), draws)

    return states


def _set_states_and_draws(plain: Any, random: DeviceRandom) -> Callable[..., None]:
    """Wrap Megatron's ``_set_all_rng_states``. A region that is checkpointed inside a fork is
    recomputed outside of it, and must draw from the same generators."""

    @functools.wraps(plain)
    def set_states(*states: Any) -> None:
        *plain_states, draws = states
        random.set_draws(False)
        plain(*plain_states)
        random.set_draws(draws)

    return set_states


def random_rows(random: DeviceRandom) -> tuple[Patch, ...]:
    """Return the rows; all of them share one generator."""
    functions: dict[str, object] = {
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
    recomputed = "what is checkpointed inside a fork is recomputed outside of it"
    checkpoint = "torch's own checkpoint restores the device's randomness before it recomputes"
    why = "Megatron's RNG tracker; torch.manual_seed seeds the device too"
    return (
        *(
            row(f"{module}:{name}", new, why, same=f"torch.cuda:{name}")
            for module in ("torch.cuda", "torch.cuda.random")
            for name, new in functions.items()
        ),
        row("torch.cuda:default_generators", random, "Megatron sets states through it"),
        row("torch.cuda:_initialized", True, checkpoint),
        row("torch.utils.checkpoint:_infer_device_type", lambda *_: "cuda", checkpoint),
        row(
            "torch.utils.checkpoint:get_device_states",
            lambda *_: ([0], random.get_states()),
            checkpoint,
        ),
        row(
            "torch.nn.functional:dropout",
            functools.partial(_device_dropout, random=random),
            "draws on the device, outside Megatron's tracked streams too",
            wraps=True,
        ),
        row(
            f"{_MEGATRON}:CudaRNGStatesTracker.fork",
            functools.partial(_device_fork, random=random),
            "weights, dropout and random routing draw from the stream of their ranks",
            wraps=True,
        ),
        row(
            f"{_MEGATRON}:_get_all_rng_states",
            functools.partial(_states_with_draws, random=random),
            recomputed,
            wraps=True,
        ),
        row(
            f"{_MEGATRON}:_set_all_rng_states",
            functools.partial(_set_states_and_draws, random=random),
            recomputed,
            wraps=True,
        ),
    )
