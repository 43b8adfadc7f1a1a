"""Options of communicators, which plugins derive from what a step sends. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.core.config.group_names import MEGATRON_GROUPS
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.contracts import CommOptions
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .cost_model.estimate import RankCost, expected_costs

if TYPE_CHECKING:
    from ascend_run.prepare.prepare import ResolvedRun

HOOK = "ascend_comm_options"


def with_comm_options(run: ResolvedRun) -> ResolvedRun:
    """Add the options to a run without a plan; ``costs.with_costs`` adds them to one with a plan.

    Raises:
        ConfigError: As ``comm_options``.
    """
    if not run.hooks.implements(HOOK):
        return run
    costs = expected_costs(run.config, run.layout, run.hooks)
    options = comm_options(run.config, run.layout, run.hooks, costs)
    return attrs.evolve(run, comm_options=options)


def comm_options(
    config: RunConfig, layout: Layout, hooks: Hooks, costs: Sequence[RankCost]
) -> Mapping[str, CommOptions]:
    """Return name of a process group -> options of its communicator.

    Args:
        costs: The estimate of each pipeline stage.

    Raises:
        ConfigError: A plugin returns options of groups that the run does not have.
    """
    communication = [sent for cost in costs for sent in cost.communication]
    found = hooks.merge_named(HOOK, config=config, layout=layout, communication=communication)
    own = hooks.merge("ascend_process_groups", config=config, layout=layout)
    known = sorted({*MEGATRON_GROUPS, *own})
    if unknown := {name: plugin for name, (plugin, _) in found.items() if name not in known}:
        raise ConfigError(
            "options of process groups that this run does not have",
            [
                f"'{plugin}' sets those of {name!r}; expected one of: {', '.join(known)}"
                for name, plugin in unknown.items()
            ],
        )
    return {name: options for name, (_, options) in found.items()}
