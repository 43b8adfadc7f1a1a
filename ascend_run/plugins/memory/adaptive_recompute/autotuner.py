"""The steps of a run: which are measured, what is chosen from them, and what is tried again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ascend_run.ops.swapping.swapper import Swapper
from ascend_run.ops.transfer.link_speed import measured_link
from ascend_run.plugin_api import Device, ForwardLink, RunContext

from .decision import Decision, decide
from .layer import Layer
from .links import links_of
from .outcome import Outcome, log
from .recorder import Mode, Recorder
from .search import Search
from .treatment import treatments
from .waiting import Channel

_UNLIMITED: Final = 1 << 62
_GIB: Final = 1 << 30


class Autotuner:
    """Chooses what becomes of the layers of one rank.

    Args:
        budget: Bytes that the layers may keep; None: no limit until memory runs out.
        profiled_steps: Steps in which parts are measured before the choice.
        swapper: Swaps parts; None: none is swapped.
        is_overlapped: Whether its copies overlap with computation.
    """

    def __init__(
        self,
        device: Device,
        *,
        budget: int | None,
        profiled_steps: int,
        swapper: Swapper | None,
        is_overlapped: bool,
    ) -> None:
        self.budget = self._most = _UNLIMITED if budget is None else budget
        self.kept = 0
        """Bytes that the layers kept in the last step that was measured."""
        self.decision: Decision | None = None
        self.outcome: Outcome | None = None
        self.search: Search | None = None
        self.recorder = Recorder(
            device,
            treatments(swaps=swapper is not None),
            can_leave=(lambda _: False) if swapper is None else swapper.takes,
        )
        self._device, self._swapper, self._is_overlapped = device, swapper, is_overlapped
        self._channel: Channel | None = None
        self._profiled_steps, self._steps = profiled_steps, 0
        self._tries_again = False

    def links(self, module: Any, place: tuple[int, int]) -> Mapping[str, ForwardLink]:
        """Return the links of a layer.

        Args:
            place: Chunk of the pipeline rank, and index in it.
        """
        return links_of(Layer(module, place), self.recorder, self._swapper)

    def begin_step(self, context: RunContext) -> None:
        """Decide if enough has been measured, and what the step that begins measures."""
        if self.recorder.mode is not Mode.NOTHING:
            self.kept = self.recorder.peak
        if self._swapper is not None:
            self._swapper.begin_step()
            self._channel = self._channel or self._measured_channel(self._swapper)
        if self._tries_again:
            self._tries_again, mode = False, Mode.LAYERS
        elif self.search is not None:
            mode = self._searched(self.search, context)
        else:
            mode = self._profiled(context)
        self.recorder.begin(mode)

    def lower_budget(self, context: RunContext) -> bool:
        """Return False if the layers keep as little as they can, or no layer has been measured."""
        recorder, decision = self.recorder, self.decision
        if decision is not None and decision.expected <= decision.least:
            return False
        recorder.assume()
        kept = recorder.peak if decision is None else decision.expected
        if self.search is None:
            found = decision or self._choice(context)
            if found is None:
                return False
            self.search = Search(found.least, max(kept, found.least), most=self._most)
        self.budget = self.search.failed(kept)
        log(
            "out_of_memory",
            warns=True,
            step=context.step + 1,
            kept_bytes=kept,
            budget_bytes=self.budget,
        )
        self._decide(context)
        self._tries_again = True
        return True

    def _profiled(self, context: RunContext) -> Mode:
        """Decide once enough steps are measured; return what the next step measures."""
        done, self._steps = self._steps, self._steps + 1
        if done == self._profiled_steps:
            self._decide(context)
        if done == self._profiled_steps + 1:
            self._take_measured()
        after = done - self._profiled_steps
        return Mode.PARTS if after < 0 else Mode.LAYERS if after == 0 else Mode.NOTHING

    def _searched(self, search: Search, context: RunContext) -> Mode:
        """Raise the budget if there may be room; return what the next step measures."""
        if search.is_settled:
            return Mode.NOTHING
        budget = search.ran()
        if budget is None:
            self._take_measured()
            return Mode.NOTHING
        self.budget = budget
        self._decide(context)
        return Mode.LAYERS

    def _choice(self, context: RunContext) -> Decision | None:
        recorder = self.recorder
        return decide(
            recorder.layers,
            recorder.moments,
            context.groups,
            context.device.torch_device,
            self.budget,
            self._channel,
        )

    def _decide(self, context: RunContext) -> None:
        found = self._choice(context)
        if found is None:
            return
        self.decision = found
        found.apply()
        last = self.outcome
        self.outcome = Outcome(
            step=context.step + 1,
            decision=found,
            budget=None if self.budget == _UNLIMITED else self.budget,
            before=(self.recorder.peak or self.kept) if last is None else last.before,
        )
        self.outcome.log_choice()

    def _take_measured(self) -> None:
        if self.outcome is not None:
            self.outcome = self.outcome.measured(self.kept)

    def _measured_channel(self, swapper: Swapper) -> Channel:
        """Measure it before the first step, while there is memory for its sample."""
        copier, device = swapper.copier, self._device
        link = measured_link(copier, copier, device.torch_device, device.synchronize)
        return Channel(
            to_host=round(_GIB / link.to_host * 1e9),
            to_device=round(_GIB / link.to_device * 1e9),
            is_overlapped=self._is_overlapped,
        )
