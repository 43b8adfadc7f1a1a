"""Choose a layout for a model on given devices, by the cost model of ``plan``. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.core.config.layout import layout_of
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.errors import AscendRunError, ConfigError
from ascend_run.prepare.checks.compatibility import compatibility_problems
from ascend_run.prepare.prepare import PreparedRun, prepare_raw
from ascend_run.tools.plan.cost_model.devices import CostDevice
from ascend_run.tools.plan.cost_model.estimate import RankCost, expected_costs
from ascend_run.tools.plan.cost_model.step_time import step_time
from ascend_run.tools.plan.cost_text import size
from ascend_run.types.config import FieldSection, RunConfig

from .candidates import (
    CONTEXT_PARALLEL,
    LONG_SEQUENCE,
    RECOMPUTE,
    Candidate,
    candidates,
    lower_bound_bytes,
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
        found = self._estimates(base, split_sequence=long)
        if not found and not long:
            found = self._estimates(base, split_sequence=True)
        if not found:
            raise self._nothing_fits()
        ranked = sorted(found, key=lambda one: (one.seconds, one.peak))
        others = [one for one in ranked if one.candidate.sizes != ranked[0].candidate.sizes]
        return Choice(best=ranked[0], runner_up=next(iter(others), None), tried=self.tried)

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

    def _estimates(self, base: _Base, *, split_sequence: bool) -> list[Estimate]:
        config = base.run.config
        layouts = list(
            candidates(
                config.model,
                self.devices,
                int(self.device.per_node),
                split_sequence=split_sequence,
            )
        )
        counts = self._counts(base)
        found = []
        for done, candidate in enumerate(layouts):
            self.progress(done, len(layouts))
            bound = lower_bound_bytes(counts, candidate, self.devices)
            if bound > self.budget:
                self.smallest = min(self.smallest, bound / (1 - KEPT_FREE))
            else:
                found += self._fitting(candidate)
        self.progress(len(layouts), len(layouts))
        return found

    def _counts(self, base: _Base) -> dict[str, float]:
        """Number of parameters of the whole model, of experts and of the rest."""
        costs = expected_costs(base.run.config, base.run.layout, base.hooks)
        parameters = [p for cost in costs for p in cost.rank.parameters]
        experts = sum(p.numel for p in parameters if p.part == "experts")
        return {"experts": experts, "dense": sum(p.numel for p in parameters) - experts}

    def _fitting(self, candidate: Candidate) -> Iterator[Estimate]:
        """Yield the candidate with the least recomputation that fits."""
        base = self._base(candidate.enable)
        if base is None:
            return
        for recompute in RECOMPUTE:
            estimate = self._estimate(attrs.evolve(candidate, recompute=recompute), base)
            if estimate is None:
                return
            if estimate.peak <= self.budget:
                yield estimate
                return
            self.smallest = min(self.smallest, estimate.peak / (1 - KEPT_FREE))

    def _estimate(self, candidate: Candidate, base: _Base) -> Estimate | None:
        """Return the estimate of a layout; None if it cannot run."""
        config = self._config(candidate, base.run.config)
        layout = layout_of(config, self.devices)
        problems = compatibility_problems(config, layout, base.run.resolution, base.hooks)
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
            f"which {KEPT_FREE:.0%} are kept free; the smallest need found is "
            f"{size(self.smallest)} per device: name more --devices, more --memory, or a shorter "
            "--seq-length"
        )
