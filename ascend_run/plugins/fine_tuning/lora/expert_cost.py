"""Cost of adapters of experts. No torch.

The experts are computed with sums of their weights and the updates, which autograd keeps, and whose
gradients, of the weights' size, give those of A and B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import Communication, ParameterCost, Phase, SavedTensor, WorkingMemory

from .sizes import rank_of_part
from .targets import wanted_experts

if TYPE_CHECKING:
    from ascend_run.plugin_api import Layout, PipelineStage, RunConfig

    from . import LoraOptions

_READ = {"experts_fc1": "experts.input", "experts_fc2": "experts.weighted"}
"""Part -> the activation from which the gradient of the weight follows."""


@attrs.frozen(kw_only=True)
class AdaptedExperts:
    """A stacked weight of one layer on one rank, and its adapter."""

    weight: ParameterCost
    experts: int  #: On this rank.
    columns: int  #: Inputs of one expert's matrix.
    rank: int
    rows: float  #: Rows that an expert multiplies in one micro-batch.

    @property
    def _outputs(self) -> int:
        return self.weight.numel // (self.experts * self.columns)

    @property
    def parameters(self) -> tuple[ParameterCost, ParameterCost]:
        """A and B."""
        name, stacked = self.weight.name, self.experts * self.rank
        sizes = {"lora_A": stacked * self.columns, "lora_B": stacked * self._outputs}
        a, b = (
            attrs.evolve(
                self.weight,
                name=f"{name}.{matrix}",
                numel=numel,
                trained=True,
                is_matrix=False,  # multiplied with each other, not with tokens
            )
            for matrix, numel in sizes.items()
        )
        return a, b

    @property
    def flops(self) -> float:
        """Of one micro-batch: the product and the two of its gradient, and the gradient of the
        sum."""
        return 2.0 * self.weight.numel * (3 * self.rank + self.rows)


def adapted_experts(
    config: RunConfig, layout: Layout, rank: PipelineStage, options: LoraOptions
) -> list[AdaptedExperts]:
    """Return the adapted weights of experts on a rank."""
    parts = wanted_experts(options.target_modules)
    found = []
    for weight in rank.parameters:
        part = f"experts_{weight.name}"
        if weight.part != "experts" or part not in parts or weight.layer is None:
            continue
        experts, hidden = config.model.num_moe_experts // layout.ep, config.model.hidden_size
        saved = {tensor.key: tensor.nbytes for tensor in rank.saved[weight.layer]}
        is_fc1 = part == "experts_fc1"
        found.append(
            AdaptedExperts(
                weight=weight,
                experts=experts,
                columns=hidden if is_fc1 else weight.numel // (experts * hidden),
                rank=rank_of_part(part, options),
                rows=saved["experts.input"] / (hidden * rank.item_bytes * experts),
            )
        )
    return found


def read_activations(options: LoraOptions) -> set[str]:
    """Return the activations that are saved for the gradients of the sums."""
    return {_READ[part] for part in wanted_experts(options.target_modules)}


def kept_sums(rank: PipelineStage, adapted: Sequence[AdaptedExperts]) -> SavedTensor:
    """Return the sums that are saved, as the mean of this rank's layers."""
    nbytes = sum(one.weight.numel for one in adapted) * rank.item_bytes / len(rank.layers)
    return SavedTensor(part="experts", name="adapted", nbytes=nbytes)


def no_gradients(
    rank: PipelineStage, adapted: Sequence[AdaptedExperts]
) -> tuple[WorkingMemory, ...]:
    """Return what the backward of a layer's experts does not hold: of each frozen weight without an
    adapter the gradient of every expert, and the stack of these."""
    formed = {one.weight for one in adapted}
    weights = [p for p in rank.parameters if p.part == "experts" and p.name in ("fc1", "fc2")]
    numel = sum(p.numel for p in weights if p not in formed)
    layers = {p.layer for p in weights}
    if not numel:
        return ()
    nbytes = -2.0 * numel * rank.item_bytes / len(layers)
    return (
        WorkingMemory(
            part="experts.weights",
            name="gradients of frozen weights",
            nbytes=nbytes,
            phase=Phase.BACKWARD,
        ),
    )


def expert_messages(
    rank: PipelineStage, layout: Layout, adapted: Sequence[AdaptedExperts]
) -> Iterator[Communication]:
    """Yield the sums of the gradients that ranks have parts of: of the A of fc1, the B of fc2."""
    if layout.expt_tp == 1 or not adapted:
        return
    shared = [one.parameters[0 if one.weight.name == "fc1" else 1] for one in adapted]
    yield Communication(
        operation="all_reduce",
        group="expt_tp",
        calls=rank.num_microbatches * len(shared),
        sent_bytes=rank.num_microbatches * rank.item_bytes * sum(one.numel for one in shared),
        why="experts, backward: adapters",
    )
