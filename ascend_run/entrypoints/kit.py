"""The conformance kit's runtime: a trial goes the way that a run goes, up to where it stops.

Describing and planning need no torch, so it is imported where a trial runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ascend_run.core.config.raw import Given, RawConfig
from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.plugin_api.testing.runtime import (
    PLATFORM_VARIABLE,
    Examined,
    OptionFacts,
    PluginFacts,
    RankOutcome,
    Trial,
)
from ascend_run.registry.discovery import discover
from ascend_run.registry.explanation import idle
from ascend_run.registry.hooks import hook_problems, implementations

from .option_docs import option_docs
from .planning import Prepared, prepare_raw

ORIGIN = "the trial"


class KitRuntime:
    """testing.runtime.Runtime on our own core."""

    def numerics_of(self, plugin: str) -> Numerics:
        """What a plugin's manifest declares.

        Raises:
            AscendRunError: It is unknown, or cannot be imported.
        """
        numerics: Numerics = discover().load([plugin])[plugin].manifest.numerics
        return numerics

    def describe(self, plugin: str) -> PluginFacts:
        catalogue = discover()
        found = catalogue.load([plugin])[plugin]
        return PluginFacts(
            plugin=found,
            kind=str(catalogue[plugin].kind),
            distribution=catalogue[plugin].distribution,
            entry_points={name: candidate.value for name, candidate in catalogue.items()},
            hooks=frozenset(implementations(found)),
            hook_problems=tuple(hook_problems(found)),
            options=tuple(
                OptionFacts(name=option.name, type=option.type, help=option.help)
                for option in option_docs(getattr(found, "config_class", None))
            ),
        )

    def examine(self, trial: Trial, world_size: int) -> Examined:
        try:
            prepared = _prepare(trial, world_size)
        except AscendRunError as error:
            return Examined(error.problems or (error.headline,))
        return Examined((), frozenset(idle(prepared.resolution, prepared.config)))

    def run(self, trial: Trial, at_end: Callable[[], None] | None = None) -> RankOutcome:
        import torch.distributed as dist

        from ascend_run.core.run import prepared_rank, seed_everything

        from .trial_work import TrialWork

        with _rank_environment(dist.get_rank(), dist.get_world_size()):
            prepared = _prepare(trial, dist.get_world_size())
            with prepared_rank(prepared.run_request()) as (hooks, context):
                seed_everything(context.config, context.layout)
                work = TrialWork(trial, hooks, context)
                outcome = work.train() if trial.steps else work.gradients()
                if at_end is not None:
                    at_end()
                return outcome


def _prepare(trial: Trial, world_size: int) -> Prepared:
    # The batches are the kit's; a run must name a dataset all the same.
    platform = os.environ.get(PLATFORM_VARIABLE, "cpu")
    given = {"data.train": ["the-kit"], "platform": platform, **trial.config}
    if trial.checkpoints:
        given |= {"run.output_dir": trial.checkpoints, "checkpoint.save": trial.checkpoints}
    values = {**given, "enable": list(trial.plugins)}
    raw = RawConfig(values={key: Given(value, ORIGIN) for key, value in values.items()})
    return prepare_raw(raw, world_size=world_size)


@contextmanager
def _rank_environment(rank: int, size: int) -> Iterator[None]:
    """The variables that a launcher would have set for this rank; no other is put back, so that a
    plugin which leaves one changed is seen."""
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
