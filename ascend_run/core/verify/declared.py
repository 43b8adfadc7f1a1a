"""Which parameters should train, by what the enabled plugins declare in ``ascend_cost``: the word
that ``plan`` counts gradients and optimizer states by."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ascend_run.core.checkpoint.parameter_pieces import ParameterPiece
from ascend_run.core.cost.estimate import expected_costs
from ascend_run.core.cost.names import parameter_key
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c


class Declared:
    """Of one rank."""

    def __init__(self, hooks: Hooks, context: c.RunContext) -> None:
        stage = context.layout.coordinate("pp")
        self._changes = expected_costs(context.config, context.layout, hooks)[stage].changes
        self._frozen = [p for change in self._changes.values() for p in change.frozen]

    def trains(self, piece: ParameterPiece) -> bool | None:
        """None where nothing is declared: a name that the plain model does not have, a parameter
        of a plugin that declares none or both kinds."""
        if piece.added_by is not None:
            change = self._changes.get(piece.added_by)
            kinds = {p.trained for p in change.parameters} if change is not None else set()
            return kinds.pop() if len(kinds) == 1 else None
        key = parameter_key(piece.name)
        if key is None:
            return None
        return not any(fnmatchcase(key, pattern) for pattern in self._frozen)
