"""Choose a layout for a model on given devices, by the cost model of ``plan``. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.core.config.layout import layout_of
from ascend_run.core.config.optimizer import optimizer_spec
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.errors import AscendRunError, ConfigError
from ascend_run.prepare.checks.compatibility import compatibility_problems
from ascend_run.prepare.prepare import PreparedRun, prepare_raw
from ascend_run.tools.plan.cost_model.devices import CostDevice
from ascend_run.tools.plan.cost_model.estimate import RankCost, expected_costs
from ascend_run.tools.plan.cost_model.state import WIDE, optimizer_bytes
from ascend_run.tools.plan.cost_model.step_time import step_time
from ascend_run.tools.plan.cost_text import size
from ascend_run.types.config import FieldSection, RunConfig

from .candidates import (
    LONG_SEQUENCE,
    Candidate,
    ParameterCounts,
    candidates,
    lower_bound_bytes,
    pipeline_passes,
)
from .runs import raw_config

KEPT_FREE: Final = 0.1
"""Share of the memory that is left to the allocator's fragmentation and to the libraries."""


@attrs.frozen(kw_only=True)
class Estimate:
    """A layout with its estimated cost."""

    candidate: Candidate
    peak: float
    """Unit: bytes of the rank that needs most."""
    seconds: float
    """Step time."""
    communication: float
    """Exposed communication of a step. Unit: seconds."""


@attrs.frozen(kw_only=True)
class Choice:
    """The fastest layout that fits, and the fastest one of other sizes."""

    best: Estimate
    runner_up: Estimate | None
    tried: int
    """Number of layouts whose cost was estimated."""


@attrs.frozen
class _Base:
    """A prepared run without layout, from which those of the candidates derive."""

    run: PreparedRun
    hooks: Hooks

    @classmethod
    def of(cls, values: Mapping[str, Any], devices: int) -> _Base:
        run = prepare_raw(raw_config(values, "preset"), devices)
        return cls(run, Hooks(run.instances()))


@attrs.frozen
class _Whole:
    """The whole model, of which each rank has a share."""

    counts: ParameterCounts
    seconds: float
    """Step time of the matmuls alone."""
    state_bytes: float
    """Optimizer state of a parameter, with its master weight, on the device between steps; the mean
    over all."""

    @classmethod
    def of(cls, base: _Base, devices: int, batch: int, device: CostDevice) -> _Whole:
        config = base.run.config
        (cost,) = expected_costs(config, base.run.layout, base.hooks)
        experts = sum(p.numel for p in cost.rank.parameters if p.part == "experts")
        # The base has one sequence per device.
        sequences = batch / devices
        time = step_time(config, base.run.layout, (cost,), device)
        changes = (change.main_param_bytes for change in cost.changes.values())
        main = [WIDE, *(size for size in changes if size is not None)][-1]
        main = main if config.train.precision != "fp32" else 0
        spec = optimizer_spec(config, base.hooks)
        trained = [p for p in cost.rank.parameters if p.trained]
        state_bytes = optimizer_bytes(spec, trained, 1, main, scalars=False)
        if cost.memory.off_device:
            state_bytes = 0.0
        return cls(
            counts=ParameterCounts(experts=experts, dense=cost.parameters - experts),
            seconds=time.matmuls * sequences,
            state_bytes=state_bytes / sum(p.numel for p in trained),
        )


def _two_best(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the fastest estimate and the fastest one of other sizes, if there is one."""
    ordered = sorted(estimates, key=lambda one: (one.seconds, one.peak))
    others = [one for one in ordered if one.candidate.sizes != ordered[0].candidate.sizes]
    return [*ordered[:1], *others[:1]]


@attrs.define
class Search:
    """The search for a layout.

    Args:
        values: Values of the run by full key, without those of a layout.
        memory: Memory of a device. Unit: bytes.
        progress: Called with (layouts done, layouts in all).
    """

    values: Mapping[str, Any]
    devices: int
    memory: float
    device: CostDevice
    progress: Callable[[int, int], None] = lambda done, total: None
    tried: int = 0
    smallest: float = float("inf")
    """Smallest peak of a layout that does not fit. Unit: bytes."""
    refused: dict[str, None] = attrs.field(factory=dict)
    """Why layouts cannot run."""
    _bases: dict[tuple[str, ...], _Base | None] = attrs.field(factory=dict)

    def choose(self) -> Choice:
        """Return the best layout.

        Raises:
            ConfigError: None fits, with the smallest peak found; or the run itself is invalid.
        """
        base = self._require_base()
        long = base.run.config.data.seq_length >= LONG_SEQUENCE
        ranked = self._ranked(base, split_sequence=long)
        if not ranked and not long:
            ranked = self._ranked(base, split_sequence=True)
        if not ranked:
            raise self._nothing_fits()
        return Choice(best=ranked[0], runner_up=(*ranked, None)[1], tried=self.tried)

    @property
    def budget(self) -> float:
        """Bytes that a layout may need."""
        return self.memory * (1 - KEPT_FREE)

    def _require_base(self) -> _Base:
        base = _Base.of(self._base_values(), self.devices)
        self._bases[()] = base
        return base

    def _base_values(self, enable: Sequence[str] = ()) -> dict[str, Any]:
        """The run with one sequence per data-parallel rank; the batch is checked per layout."""
        values = {**self.values, "train.global_batch_size": self.devices}
        if enable:
            values |= {"enable": [*enable], "parallel.context_parallel_size": 2}
        return values

    def _base(self, enable: tuple[str, ...]) -> _Base | None:
        """Return the base with some plugins; None if they cannot run with this model."""
        if enable not in self._bases:
            try:
                self._bases[enable] = _Base.of(self._base_values(enable), self.devices)
            except AscendRunError as error:
                self._bases[enable] = None
                self.refused |= dict.fromkeys(error.problems or [error.headline])
        return self._bases[enable]

    def _ranked(self, base: _Base, *, split_sequence: bool) -> list[Estimate]:
        """Return the two fastest layouts of different sizes that fit, the fastest first.

        Layouts that cannot be among them by their parameters or pipeline bubble alone are skipped.
        """
        batch = self.values["train.global_batch_size"]
        layouts = sorted(
            candidates(
                base.run.config.model,
                self.devices,
                int(self.device.per_node),
                split_sequence=split_sequence,
            ),
            key=lambda one: (pipeline_passes(one, self.devices, batch), one.tp, one.cp, one.ep),
        )
        whole = _Whole.of(base, self.devices, batch, self.device)
        ranked: list[Estimate] = []
        for done, candidate in enumerate(layouts):
            self.progress(done, len(layouts))
            fastest = whole.seconds * pipeline_passes(candidate, self.devices, batch)
            if len(ranked) == 2 and fastest >= ranked[1].seconds:
                break
            bound = lower_bound_bytes(whole.counts, candidate, self.devices, whole.state_bytes)
            if bound > self.budget:
                self.smallest = min(self.smallest, bound / (1 - KEPT_FREE))
                continue
            for estimate in self._fitting(candidate):
                ranked = _two_best([*ranked, estimate])
        self.progress(len(layouts), len(layouts))
        return ranked

    def _fitting(self, candidate: Candidate) -> Iterator[Estimate]:
        """Yield the candidate with the least recomputation that fits."""
        base = self._base(candidate.enable)
        if base is None:
            return
        # Selective recomputation is between the other two, so it is tried last.
        plain, full = (attrs.evolve(candidate, recompute=how) for how in ("none", "full"))
        if (estimate := self._estimate(plain, base)) is None or self._fits(estimate):
            yield from () if estimate is None else (estimate,)
            return
        if (smaller := self._estimate(full, base)) is None or not self._fits(smaller):
            return
        between = self._estimate(attrs.evolve(candidate, recompute="selective"), base)
        yield smaller if between is None or not self._fits(between) else between

    def _fits(self, estimate: Estimate) -> bool:
        if estimate.peak <= self.budget:
            return True
        self.smallest = min(self.smallest, estimate.peak / (1 - KEPT_FREE))
        return False

    def _estimate(self, candidate: Candidate, base: _Base) -> Estimate | None:
        """Return the estimate of a layout; None if it cannot run."""
        config = self._config(candidate, base.run.config)
        layout = layout_of(config, self.devices)
        problems = compatibility_problems(
            config, layout, base.run.resolution, base.hooks, base.run.model_differences
        )
        if problems:
            self.refused |= dict.fromkeys(problems)
            return None
        self.tried += 1
        costs: tuple[RankCost, ...] = expected_costs(config, layout, base.hooks)
        time = step_time(config, layout, costs, self.device)
        return Estimate(
            candidate=candidate,
            peak=max(cost.memory.peak for cost in costs),
            seconds=time.total,
            communication=time.communication,
        )

    def _config(self, candidate: Candidate, base: RunConfig) -> RunConfig:
        chosen = candidate.values(self.devices, experts=bool(base.model.num_moe_experts))
        sections: dict[str, dict[str, Any]] = {}
        for key, value in chosen.items():
            section, _, name = key.rpartition(".")
            sections.setdefault(section, {})[name] = value
        batch = self.values["train.global_batch_size"]
        parallel = {"context_parallel_size": 1, **sections.get("parallel", {})}
        return attrs.evolve(
            base,
            model=FieldSection({**base.model, **sections.get("model", {})}),
            parallel=FieldSection({**base.parallel, **parallel}),
            ddp=attrs.evolve(base.ddp, **sections.get("ddp", {})),
            train=attrs.evolve(base.train, global_batch_size=batch),
        )

    def _nothing_fits(self) -> ConfigError:
        if self.tried == 0 and self.smallest == float("inf"):
            return ConfigError("no layout can run", [*self.refused][:10])
        return ConfigError(
            f"no layout on {self.devices} devices fits into {size(self.memory)} of memory, of "
            f"which {KEPT_FREE:.0%} are kept free; the smallest need found is at least "
            f"{size(self.smallest)} per device: name more --devices, more --memory, or a shorter "
            "--seq-length"
        )
