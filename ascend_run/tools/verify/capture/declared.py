"""Which parameters should train, as the enabled plugins declare in ``ascend_cost``; ``plan``
estimates gradients and optimizer state from the same declaration."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.testing.parameter_shards import ParameterShard
from ascend_run.tools.plan.cost_model.estimate import expected_costs
from ascend_run.tools.plan.cost_model.names import parameter_key


class Declared:
    """The declarations that apply to one rank."""

    def __init__(self, hooks: Hooks, context: c.RunContext) -> None:
        stage = context.layout.coordinate("pp")
        self._changes = expected_costs(context.config, context.layout, hooks)[stage].changes
        self._frozen = [p for change in self._changes.values() for p in change.frozen]

    def trains(self, shard: ParameterShard) -> bool | None:
        """Whether a parameter should train; None if nothing is declared: its name is not in the
        plain model, or its plugin declares no parameters or both trained and frozen ones."""
        if shard.added_by is not None:
            change = self._changes.get(shard.added_by)
            kinds = {p.trained for p in change.parameters} if change is not None else set()
            return kinds.pop() if len(kinds) == 1 else None
        key = parameter_key(shard.name)
        if key is None:
            return None
        return not any(fnmatchcase(key, pattern) for pattern in self._frozen)
