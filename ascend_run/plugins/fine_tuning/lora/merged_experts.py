"""The updates of experts' weights in Hugging Face's files, which have each expert's own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ascend_run.ops.linear.low_rank import low_rank_update, scale_of
from ascend_run.ops.linear.peft_experts import a_by_expert, b_by_expert
from ascend_run.ops.linear.peft_settings import alpha_of, expert_parameters, rank_of
from ascend_run.plugin_api import CheckpointError

_EXPERT: Final = re.compile(
    r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_STACKED: Final[Mapping[str, tuple[str, int | None]]] = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", None),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", None),
}
"""Weight of one expert -> the parameter of all experts, and which half of its rows it is."""


@attrs.frozen(kw_only=True)
class ExpertUpdate:
    """The update of one expert's weight, as matrices of PEFT's file."""

    module: str
    """PEFT's module, of which the update is a part."""
    parameter: str
    """Of all experts, in Hugging Face's model."""
    expert: int
    half: int | None

    def of(self, config: Mapping[str, Any], matrices: Any, weight: Tensor, present: int) -> Tensor:
        """Return it, float64.

        Args:
            config: PEFT's settings.
            matrices: An open safetensors file.
            weight: Of the expert.
            present: Experts of which the model has this weight.

        Raises:
            CheckpointError: The adapter is for other experts.
        """
        prefix = f"base_model.model.{self.module}"
        a, b = (matrices.get_tensor(f"{prefix}.lora_{part}.weight") for part in "AB")
        rank = rank_of(config, self.parameter)
        count, rows = len(a) // rank, len(b) // (1 if self.half is None else 2)
        whole = (present * rank, rank * present) == (len(a), b.shape[1])
        if (rows, a.shape[1]) != tuple(weight.shape) or self.expert >= present or not whole:
            raise CheckpointError(
                f"{self.parameter}: the adapter is of rank {rank}, with lora_A {[*a.shape]} and "
                f"lora_B {[*b.shape]}, so for {count} experts with weights of "
                f"{[rows, a.shape[1]]}; the model has {present} with {[*weight.shape]}"
            )
        own_a = a_by_expert(a, count)[self.expert]
        own_b = b_by_expert(b, count)[self.expert]
        if self.half is not None:
            own_b = own_b.chunk(2)[self.half]
        rslora = bool(config.get("use_rslora"))
        scale = scale_of(alpha_of(config, self.parameter), rank, rslora=rslora)
        return low_rank_update(own_a, own_b, scale, torch.float64)


def expert_counts(names: Iterable[str]) -> Counter[tuple[str, str]]:
    """Count the experts that have a weight, by (layer, kind of weight)."""
    matches = map(_EXPERT.fullmatch, names)
    return Counter((match[1], match[3]) for match in matches if match)


def weight_of_expert(name: str) -> tuple[str, str]:
    """Return the layer and the kind of an expert's weight."""
    match = _EXPERT.fullmatch(name)
    assert match is not None
    return match[1], match[3]


def expert_update(name: str, config: Mapping[str, Any]) -> ExpertUpdate | None:
    """Return the update of a stored tensor of one expert, by its name in a Hugging Face folder;
    None if it is another's or if no experts' parameter of this kind is adapted."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    parameter, half = _STACKED[match[3]]
    modules = {named: module for module, named in expert_parameters(config).items()}
    if parameter not in modules:
        return None
    layer = match[1]
    return ExpertUpdate(
        module=f"{layer}.{modules[parameter]}",
        parameter=f"{layer}.mlp.experts.{parameter}",
        expert=int(match[2]),
        half=half,
    )
