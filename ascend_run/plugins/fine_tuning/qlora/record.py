"""How the base of a checkpoint's adapters was quantised. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import structlog

from ascend_run.plugin_api import CheckpointError

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunContext

    from . import QloraOptions

_TP = "tensor_model_parallel_size"


class QuantisationRecord:
    """Store in the checkpoint what the values of the base depend on, beside its weights.

    Implements contracts.CheckpointEntry. ``ascend-run convert`` reads it, to merge adapters.
    """

    def __init__(self, context: RunContext, options: QloraOptions) -> None:
        config = context.config
        self._options = {
            "blocksize": options.blocksize,
            "use_double_quant": options.use_double_quant,
        }
        self._run = {
            "precision": config.train.precision,
            _TP: config.parallel.tensor_model_parallel_size,
        }

    def state_dict(self) -> Mapping[str, object]:
        return {**self._options, **self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check the stored record against this run; another tensor-parallel size is a warning.

        Raises:
            CheckpointError: The adapters were trained beside a base that was quantised otherwise.
        """
        problems = [
            f"plugins.qlora.{name}={now}, but the base of the checkpoint's adapters had "
            f"{state[name]}"
            for name, now in self._options.items()
            if state[name] != now
        ]
        if problems:
            raise CheckpointError("the run cannot resume beside this base", problems)
        if state[_TP] != self._run[_TP]:
            structlog.get_logger().warning(
                "qlora.other_blocks",
                saved=state[_TP],
                now=self._run[_TP],
                why="each rank quantises its shard, so blocks and scales differ",
                fix=f"set parallel.{_TP}={state[_TP]} to continue beside the same values",
            )
