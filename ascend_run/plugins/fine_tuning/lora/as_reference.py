"""The adapted model as a task's reference: without its adapters, or with the loaded ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from .expert_adapter import AnyAdapter, every_adapter


@contextmanager
def switched_off(modules: Sequence[AnyAdapter]) -> Iterator[None]:
    """Let linears compute what they did without these adapters."""
    for adapter in modules:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in modules:
            adapter.is_on = True


def copy_loaded(model: nn.Module) -> None:
    """Remember the values of adapters that were loaded, before they are trained."""
    for adapter in every_adapter(model):
        adapter.loaded = {n: p.detach().clone() for n, p in adapter.named_parameters()}


@contextmanager
def as_loaded(modules: Sequence[AnyAdapter]) -> Iterator[None]:
    """Let linears compute with the adapters that the run began with; without gradients."""
    trained = [(p, p.data) for adapter in modules for p in adapter.parameters()]
    for adapter in modules:
        for name, parameter in adapter.named_parameters():
            parameter.data = adapter.loaded[name].to(parameter)
    try:
        yield
    finally:
        for parameter, values in trained:
            parameter.data = values
