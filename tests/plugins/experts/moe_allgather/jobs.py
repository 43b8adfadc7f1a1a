"""What happens in a run on a rank, in order."""

from __future__ import annotations

from typing import Any

from ascend_run.testing.runtime import Trial, run_trial
from tests.ops.experts.dispatcher_jobs import log_exchanges, logging


def events(trial: Trial) -> list[str]:
    """Return each issue and wait of the dispatchers, and each forward of shared experts."""
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    log: list[str] = []
    owner: Any = SharedExpertMLP
    undo, plain = log_exchanges(log), owner.forward
    owner.forward = logging(plain, log, "shared")
    try:
        run_trial(trial)
    finally:
        owner.forward = plain
        undo()
    return log
