"""Recompute while a rank waits for gradients, through the arguments of Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from ascend_run.ops.recomputed import RandomState

from .choice import Choice
from .order import ScheduleOrder
from .repetition import repeat, saving_input

Schedule: TypeAlias = Callable[..., Any]
"""Megatron's forward-backward function."""


class _Handle(Protocol):
    """Of a send or receive that was issued."""

    def wait(self) -> object: ...


class RecomputeAhead:
    """What the recomputed layers of a rank have in common.

    Args:
        choose: Which forwards of a step keep everything, and when the others are recomputed.
        random_state: Returns the present state of the random generators.
        num_layers: Recomputed layers of a chunk that are recomputed before its backward: the last
            ones. None: all.
    """

    def __init__(
        self,
        choose: Callable[[ScheduleOrder], Choice],
        random_state: Callable[[], RandomState],
        num_layers: int | None = None,
    ) -> None:
        self._choose, self._random_state, self._num_layers = choose, random_state, num_layers
        self._choices: dict[ScheduleOrder, Choice] = {}
        self._step: _Step | None = None
        self.counts: dict[str, float] = {}
        """Recomputed layers of the last step: ``ahead`` of their backward, ``in_backward``."""

    @property
    def keeps(self) -> bool:
        """Whether the forward that runs now saves everything."""
        return self._step is not None and self._step.keeps

    def saving_input(
        self, layer: Hashable, forward: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Call the forward of a layer, or of a block of it, of which only the input is saved."""
        out, node = saving_input(forward, self._random_state(), x)
        if self._step is not None:
            self._step.layers.setdefault(layer, []).append(node)
        return out

    def schedule(self, inner: Schedule) -> Schedule:
        """Wrap the schedule: of a training step of a virtual pipeline; others are not changed."""

        def run(*, model: Any, forward_only: bool = False, **given: Any) -> Any:
            if forward_only or not isinstance(model, list) or len(model) == 1:
                return inner(model=model, forward_only=forward_only, **given)
            p2p = given["p2p_communicator"]
            order = ScheduleOrder(
                p2p.pp_group.size(),
                p2p.pp_group.rank(),
                len(model),
                p2p.config.microbatch_group_size_per_vp_stage,
                given["num_microbatches"],
            )
            if order not in self._choices:
                self._choices[order] = self._choose(order)
            self._step = step = _Step(order, self._choices[order], model, self._num_layers)
            given["forward_step_func"] = partial(step.forward, given["forward_step_func"])
            given["p2p_communicator"] = _WaitingCommunicator(p2p, step)
            try:
                result = inner(model=model, **given)
            finally:
                self._step = None
            self.counts = {"ahead": step.ahead, "in_backward": step.total - step.ahead}
            return result

        return run


class _Step:
    """The forwards and backwards of one step, as far as they have come."""

    def __init__(
        self, order: ScheduleOrder, choice: Choice, model: Sequence[object], num_layers: int | None
    ) -> None:
        self._order, self._choice, self._model, self._num = order, choice, model, num_layers
        self._forward_of = {end: number for number, end in enumerate(order.ends)}
        self._forwards: list[dict[Hashable, list[Any]]] = []
        """Forward -> layer -> what backward has to repeat of it."""
        self.backwards = -1
        """Backwards so far; before the first wait -1."""
        self._due: tuple[int, ...] = ()
        """Forwards to recompute at the next wait."""
        self.keeps = False
        self.ahead = self.total = 0

    @property
    def layers(self) -> dict[Hashable, list[Any]]:
        """Of the forward that runs now."""
        return self._forwards[-1]

    @property
    def is_over(self) -> bool:
        """Whether the last backward has run."""
        return self.backwards == len(self._order.backwards)

    def forward(self, inner: Callable[..., Any], batches: Any, model: object, *more: Any) -> Any:
        """Run the next forward."""
        number = len(self._forwards)
        chunk, _ = self._order.forwards[number]
        if self._model[chunk] is not model:
            raise RuntimeError(
                f"forward {number} of this step is not that of chunk {chunk}: the schedule is not "
                "the interleaved one"
            )
        self._forwards.append({})
        self.keeps = number in self._choice.kept
        result = inner(batches, model, *more)
        self.keeps = False
        self.total += len(self.layers)
        return result

    def recompute(self) -> None:
        """Recompute what is due before the next backward, at the first of its waits."""
        due, self._due = self._due, ()
        for number in due:
            for nodes in [*self._forwards[number].values()][::-1][: self._num]:
                for node in reversed(nodes):
                    repeat(node)
                self.ahead += 1

    def after_backward(self) -> None:
        """Count a backward, and release its graph."""
        if self.backwards >= 0:
            self._forwards[self._forward_of[self.backwards]] = {}
        self.backwards += 1
        self._due = () if self.is_over else self._choice.due[self.backwards]


class _WaitingCommunicator:
    """Megatron's communicator, which recomputes before it waits for a gradient.

    Both methods below are called once before the first backward, and once after each.
    """

    def __init__(self, inner: Any, step: _Step) -> None:
        self._inner, self._step = inner, step
        self._sent: tuple[_Handle, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        return self.send_backward_recv_backward(None, not is_last_stage, tensor_shapes)

    def send_backward_recv_backward(
        self,
        input_tensor_grad: Tensor | None,
        recv_next: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        self._step.after_backward()
        gradient, handles = self._inner.send_backward_recv_backward(
            input_tensor_grad, recv_next, tensor_shape, overlap_p2p_comm=True
        )
        if overlap_p2p_comm:
            if "recv_next" in handles:
                handles["recv_next"] = _Recomputing(handles["recv_next"], self._recompute)
            return gradient, handles
        # Waiting for the send as well would be waiting for the other rank to come to its receive.
        self._finish_send()
        if input_tensor_grad is not None:
            self._sent = handles["send_prev"], input_tensor_grad
        if recv_next:
            self._recompute()
            handles["recv_next"].wait()
        if self._step.is_over:
            self._finish_send()
        return gradient

    def _finish_send(self) -> None:
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None

    def _recompute(self) -> None:
        timers = self._inner.config.timers
        if timers is not None:
            timers("backward-compute", log_level=2).start()
        self._step.recompute()
        if timers is not None:
            timers("backward-compute").stop()


class _Recomputing:
    """The handle of a receive, which recomputes before it waits."""

    def __init__(self, inner: _Handle, recompute: Callable[[], None]) -> None:
        self._inner, self._recompute = inner, recompute

    def wait(self) -> object:
        self._recompute()
        return self._inner.wait()
