"""Records which modules read which fields of a run's config while tiny runs are planned, built and
trained for a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import attrs
import pytest

from ascend_run.core.config.megatron_fields import megatron_fields
from ascend_run.types.config import FieldSection, FrozenMapping

Reads: TypeAlias = frozenset[tuple[str, str]]
"""Pairs of a field and the module that reads it."""

_PASSING_ON: Final = frozenset(
    {"collections.abc", "_collections_abc", "copy", "dataclasses", "ascend_run.types.config"}
)
"""Modules that read a field on behalf of another, or copy the entire config."""


@contextmanager
def recorded_reads() -> Iterator[set[tuple[str, str]]]:
    """Record every field read from a TransformerConfig, and from ``[model]`` and ``[parallel]``,
    with the module whose code reads it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = frozenset(megatron_fields())
    seen: set[tuple[str, str]] = set()
    read_attribute, read_item = object.__getattribute__, FrozenMapping.__getitem__

    def note(name: object) -> None:
        if name in fields:
            frame = sys._getframe(2)
            while frame.f_globals["__name__"] in _PASSING_ON and frame.f_back is not None:
                frame = frame.f_back
            seen.add((str(name), frame.f_globals["__name__"]))

    def of_megatron(self: Any, name: str) -> Any:
        note(name)
        return read_attribute(self, name)

    def of_section(self: Any, name: str) -> Any:
        note(name)
        try:
            return read_item(self, name)
        except KeyError:
            raise AttributeError(name) from None

    def item_of_section(self: Any, name: str) -> Any:
        note(name)
        return read_item(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerConfig, "__getattribute__", of_megatron, raising=False)
        patch.setattr(FieldSection, "__getattr__", of_section)
        patch.setattr(FieldSection, "__getitem__", item_of_section, raising=False)
        yield seen


def reads_of(values: Mapping[str, Any]) -> Reads:
    """Return what this rank of a run reads, in planning and in one step. A job for the pool."""
    from .small_runs import training

    with recorded_reads() as seen, training(values) as run:
        run.step()
    return frozenset(seen)


def reads_with_a_router_of_megatron(values: Mapping[str, Any], router: Mapping[str, Any]) -> Reads:
    """Do the same with a plugin that owns the router and provides Megatron's.

    Args:
        router: Fields of ``[model]`` that the built-in router would reject.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    from ascend_run.core.run import prepared_rank
    from ascend_run.core.train.seeding import seed_everything

    from .probed_runs import probe
    from .small_runs import Training, prepare, rank_environment

    owner = probe("ascend_router", lambda self: TopKRouter, "routing")
    with recorded_reads() as seen, rank_environment():
        asked = prepare(values).run_request()
        config = attrs.evolve(asked.config, model=FieldSection({**asked.config.model, **router}))
        asked = attrs.evolve(asked, config=config, plugins=[owner, *asked.plugins])
        with prepared_rank(asked) as (hooks, context):
            seed_everything(context.config, context.layout)
            Training(values, hooks, context).step()
    return frozenset(seen)
