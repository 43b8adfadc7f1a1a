"""What plugins have around the phases of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Final, Self

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.contracts import RunContext, RunPhase

_TIMERS: Final = {
    "forward-compute": RunPhase.FORWARD,
    "backward-compute": RunPhase.BACKWARD,
    "all-grads-sync": RunPhase.REDUCTION,
    "non-tensor-parallel-grads-all-reduce": RunPhase.REDUCTION,
    "embedding-grads-all-reduce": RunPhase.REDUCTION,
}


def phase_scope(
    hooks: Hooks, context: RunContext, phase: RunPhase
) -> Callable[[], AbstractContextManager[None]]:
    """Return a function to a context manager that enters the plugins' own; a no-op without any."""
    scopes = [*hooks.contributions("ascend_phase", context=context, phase=phase)]

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            for plugin, scope in reversed(scopes):
                with hooks.naming("ascend_phase", plugin):
                    stack.enter_context(scope())
            yield

    return enter if scopes else nullcontext


class ScheduleTimers(ExitStack):
    """Megatron's timers, which enter and exit a phase. Around a schedule, it exits what an
    exception has left entered."""

    def __init__(self, hooks: Hooks, context: RunContext) -> None:
        super().__init__()
        self._scopes = {name: phase_scope(hooks, context, p) for name, p in _TIMERS.items()}

    def __call__(self, name: str, log_level: int = 0) -> Self:
        self._named = self._scopes.get(name, nullcontext)
        return self

    def start(self, barrier: bool = False) -> None:
        self.enter_context(self._named())

    stop = ExitStack.close  # no phase of a schedule is within another
