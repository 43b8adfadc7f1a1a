"""Layouts that a model may have on a number of devices. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs

from ascend_run.plugin_api.error_text import divisors
from ascend_run.types.config import FieldSection
from ascend_run.types.layout import axis_settings

LONG_SEQUENCE: Final = 16384
"""From this length on the sequence may be split over ranks. Unit: tokens."""
CONTEXT_PARALLEL: Final = ("ulysses", "ring-attention")
"""The plugins that are tried with context parallelism."""
_LARGEST_CP: Final = 16
_EVEN_SPLITS: Final[tuple[tuple[str, ...], ...]] = (
    (),
    ("account_for_loss_in_pipeline_split",),
    ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
"""Options that count the embedding or the loss as a layer, so that the layers can be divided."""


@attrs.frozen(kw_only=True)
class Candidate:
    """One layout with what belongs to it."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    enable: tuple[str, ...] = ()
    """The plugin of context parallelism."""
    split: tuple[str, ...] = ()
    """Options of the division of layers over stages."""
    recompute: str = "none"
    """``none``, ``selective`` (the MLPs or experts) or ``full``."""

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size of the axes above 1."""
        axes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}
        return {axis: size for axis, size in axes.items() if size > 1}

    def values(self, devices: int, *, experts: bool) -> dict[str, Any]:
        """Return the config values of the layout, by full key.

        Args:
            devices: Ranks of the run.
            experts: Whether the model has experts.
        """
        values: dict[str, Any] = {**axis_settings(self.sizes)}
        if self.tp > 1:
            values["parallel.sequence_parallel"] = True
        values |= {f"model.{name}": True for name in self.split}
        if self.recompute == "full":
            values["model.recompute_granularity"] = "full"
            values["model.recompute_method"] = "uniform"
            values["model.recompute_num_layers"] = 1
        elif self.recompute == "selective":
            values["model.recompute_granularity"] = "selective"
            values["model.recompute_modules"] = ["moe" if experts else "mlp"]
        if devices > self.tp * self.pp:
            for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
                values[f"ddp.{name}"] = True
            values["ddp.overlap_param_gather"] = True
        if self.enable:
            values["enable"] = [*self.enable]
        return values

    def text(self, devices: int) -> str:
        """Return ``tp 2, pp 4, dp 8, full recompute``."""
        sizes = {**self.sizes, "dp": devices // (self.tp * self.pp * self.cp)}
        words = [f"{axis} {size}" for axis, size in sizes.items()]
        if self.enable:
            words.append(" and ".join(self.enable))
        words.append("no recompute" if self.recompute == "none" else f"{self.recompute} recompute")
        return ", ".join(words)


def candidates(
    model: FieldSection, devices: int, per_node: int, *, split_sequence: bool
) -> Iterator[Candidate]:
    """Yield the layouts of which ``devices`` is a multiple and whose stages are even.

    Heads, experts and batch are checked with the run.

    Args:
        per_node: Largest tensor-parallel size, as its collectives are exposed.
        split_sequence: Whether to split the sequence over ranks too.
    """
    experts = model.num_moe_experts
    for pp in divisors(devices):
        if (split := _split(model.num_layers, pp)) is None:
            continue
        for tp in divisors(devices // pp, at_most=per_node):
            for cp in divisors(devices // (pp * tp), at_most=_LARGEST_CP if split_sequence else 1):
                for ep in divisors(experts, at_most=devices // pp) if experts else [1]:
                    for name in CONTEXT_PARALLEL if cp > 1 else [None]:
                        yield Candidate(
                            tp=tp, pp=pp, cp=cp, ep=ep, split=split, enable=(name,) if name else ()
                        )


def _split(layers: int, pp: int) -> tuple[str, ...] | None:
    """Return the options with which ``layers`` can be divided over ``pp`` stages; None: none."""
    for options in _EVEN_SPLITS if pp > 1 else _EVEN_SPLITS[:1]:
        extra = len(options)
        if (layers + extra) % pp == 0 and (layers + extra) // pp > int(extra > 0):
            return options
    return None


def pipeline_passes(candidate: Candidate, devices: int, global_batch_size: int) -> float:
    """Return the step time over that without a pipeline bubble, at least 1."""
    ranks = devices // (candidate.tp * candidate.pp * candidate.cp)
    return 1 + (candidate.pp - 1) * ranks / global_batch_size


@attrs.frozen(kw_only=True)
class ParameterCounts:
    """Number of parameters of the whole model."""

    experts: float
    dense: float
    """Of the rest."""


def lower_bound_bytes(
    counts: ParameterCounts, candidate: Candidate, devices: int, state_bytes: float
) -> float:
    """Return bytes that the weights, gradients and optimizer state of a rank cannot be less than.

    Args:
        state_bytes: Optimizer state of one parameter, with its master weight.
    """
    ranks = devices // candidate.pp
    dense = counts.dense / (candidate.pp * candidate.tp)
    experts = counts.experts / (candidate.pp * candidate.ep)
    weights = 2 * 2 * (dense + experts)
    state = state_bytes * (counts.dense + counts.experts) / (candidate.pp * ranks)
    return weights + state
