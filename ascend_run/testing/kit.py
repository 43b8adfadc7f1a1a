"""The conformance kit's runtime: executes a trial with the same code as a run.

Torch is imported only when a trial runs; describing and planning do not need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.plugin_api.implementations import implementations
from ascend_run.prepare.config.raw import RawConfig, RawValue
from ascend_run.prepare.plan.explanation import idle
from ascend_run.prepare.prepare import PreparedRun, prepare_rank, prepare_raw
from ascend_run.registry.discovery import discover
from ascend_run.registry.hooks import hook_problems
from ascend_run.testing.gloo_on_device import gloo_on_device, local_rank
from ascend_run.testing.listeners import Listeners, unnamed_errors, watched_listeners
from ascend_run.testing.option_docs import option_docs
from ascend_run.testing.runtime import (
    PLATFORM_VARIABLE,
    Examined,
    FamilyOutcome,
    OptionFacts,
    PluginFacts,
    RankOutcome,
    Trial,
)

if TYPE_CHECKING:
    from ascend_run.core.hooks import Hooks
    from ascend_run.plugin_api import contracts as c

ORIGIN = "the trial"


class KitRuntime:
    """Implementation of ``testing.runtime.Runtime`` on ``ascend_run.core``."""

    def numerics_of(self, plugin: str) -> Numerics:
        """Return the numerics that a plugin's manifest declares.

        Raises:
            AscendRunError: The plugin is unknown, or cannot be imported.
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

        from ascend_run.core.run import prepared_rank
        from ascend_run.core.train.seeding import seed_everything

        from .trial_work import TrialWork

        rank, size = dist.get_rank(), dist.get_world_size()
        with rank_environment(rank, size):
            prepared = _prepare(trial, size) if rank == 0 else prepare_rank(raw_config(trial), size)
            with (
                self._watched(trial) as listeners,
                prepared_rank(prepared.run_request()) as (hooks, context),
                gloo_on_device(context.device.torch_device.type),
            ):
                seed_everything(context.config, context.layout)
                work = TrialWork(trial, hooks, context)
                outcome = work.train() if trial.steps else work.gradients()
                if at_end is not None:
                    at_end()
                return _with_listeners(outcome, trial, listeners, hooks, context)

    def against_transformers(self, family: str, folder: str) -> FamilyOutcome:
        from .hugging_face.families import against_transformers

        with rank_environment(0, 1):
            return against_transformers(self.describe(family).plugin, Path(folder), _prepare)

    def _watched(self, trial: Trial) -> AbstractContextManager[Listeners]:
        if not trial.listens_to:
            return nullcontext(Listeners())
        return watched_listeners(self.describe(trial.listens_to).plugin)


def _with_listeners(
    outcome: RankOutcome, trial: Trial, listeners: Listeners, hooks: Hooks, context: c.RunContext
) -> RankOutcome:
    """Add what was seen of listeners, and let each raise an error."""
    calls = dict(listeners.calls)
    arguments: dict[str, object] = {"context": context, "metrics": {}, "loss": 0.0, "path": ""}

    def notify(name: str) -> None:
        names = hook_points()[name].arguments
        hooks.event(name)(**{argument: arguments[argument] for argument in names})

    unnamed = tuple(unnamed_errors(listeners, trial.listens_to, notify))
    return attrs.evolve(outcome, listener_calls=calls, unnamed_errors=unnamed)


def _prepare(trial: Trial, world_size: int) -> PreparedRun:
    return prepare_raw(raw_config(trial), world_size=world_size)


def raw_config(trial: Trial) -> RawConfig:
    """Return the config of a trial's run."""
    # The kit provides the batches, but a run must have a dataset.
    platform = os.environ.get(PLATFORM_VARIABLE, "cpu")
    given = {"data.train": ["the-kit"], "platform": platform, **trial.config}
    if trial.checkpoints:
        given |= {
            "run.output_dir": trial.checkpoints,
            "checkpoint.save": trial.checkpoints,
            "train.log_interval": 1,
            "train.eval_iters": 1,
        }
    values = {**given, "enable": list(trial.plugins)}
    return RawConfig(values={key: RawValue(value, ORIGIN) for key, value in values.items()})


@contextmanager
def rank_environment(rank: int, size: int) -> Iterator[None]:
    """Set the variables that a launcher sets for this rank. Only these are restored, so that a
    plugin that leaves another one changed is detected."""
    ours = {"RANK": str(rank), "LOCAL_RANK": str(local_rank(rank)), "WORLD_SIZE": str(size)}
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
