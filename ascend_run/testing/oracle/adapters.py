"""LoRA: ``y = W x + scale * B A x`` with A and B trained, W frozen.

Sources: arXiv:2106.09685, scale ``alpha / r``; rank-stabilized, arXiv:2312.03732, ``alpha / sqrt(r)``.
"""

# shapes: see the package

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ascend_run.types.config import RunConfig

from .layers import Linear


class Adapter(nn.Module):
    """The adapters of one linear, one for each projection that it fuses.

    ``lora_A`` holds the A of each adapted projection below one another; ``lora_B`` has the B of
    each, with the projection's own rows.

    Args:
        rows: Projection -> its rows in the linear. The linear holds them in turn for each group.
        groups: Key-value groups for ``linear_qkv``, else 1.
        adapted: Projections that have an adapter.
    """

    def __init__(
        self,
        config: RunConfig,
        width: int,
        rows: Mapping[str, int],
        groups: int,
        adapted: frozenset[str],
    ) -> None:
        super().__init__()
        options = config.plugins["lora"]
        self.rows, self.groups, self.rank = rows, groups, options.rank
        self.adapted = [name for name in rows if name in adapted]
        root = math.sqrt(options.rank) if options.rslora else options.rank
        self.scale = options.alpha / root
        self.lora_A = nn.Parameter(torch.empty(len(self.adapted) * options.rank, width))
        self.lora_B = nn.ParameterDict(
            {name: torch.empty(rows[name], options.rank) for name in self.adapted}
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = dict(zip(self.adapted, (x @ self.lora_A.t()).split(self.rank, -1), strict=True))
        outputs = [
            (inner[name] @ self.lora_B[name].t() if name in inner else x.new_zeros(*x.shape[:-1], n))
            for name, n in self.rows.items()
        ]
        by_group = [out.unflatten(-1, (self.groups, -1)) for out in outputs]
        return self.scale * torch.cat(by_group, dim=-1).flatten(-2)


def add_adapters(layers: nn.ModuleList, config: RunConfig) -> None:
    """Add the adapters of a model's layers, if the run has any."""
    if "lora" not in config.enable:
        return
    targets = {*config.plugins["lora"].target_modules}
    for layer in layers:
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj"):
            _adapt(layer, name, targets, config)
        for name in ("mlp.linear_fc1", "mlp.linear_fc2"):
            _adapt(layer, name, targets, config)


def _adapt(layer: nn.Module, name: str, targets: set[str], config: RunConfig) -> None:
    """Add the adapter of one linear; a layer with experts or latents lacks some of them."""
    found: nn.Module | None = layer
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Linear):
        return
    short = name.rpartition(".")[2]
    rows, groups = _projections(layer, short, len(found.weight))
    everything = targets & {"all-linear", short}
    adapted = frozenset(rows) if everything else frozenset(rows) & targets
    if adapted:
        found.adapter = Adapter(config, found.weight.shape[1], rows, groups, adapted)


def _projections(layer: nn.Module, linear: str, rows: int) -> tuple[dict[str, int], int]:
    """Return the rows of each projection that a linear fuses, and its groups."""
    if linear == "linear_qkv":
        attention = layer.self_attention
        keys = attention.groups * attention.width
        return {"linear_q": attention.shared * keys, "linear_k": keys, "linear_v": keys}, int(
            attention.groups
        )
    if linear == "linear_fc1" and layer.mlp.gated:
        return {"linear_fc1_gate": rows // 2, "linear_fc1_up": rows // 2}, 1
    return {linear: rows}, 1


def freeze_all_but_adapters(model: nn.Module) -> None:
    """Train adapters alone, if the model has any."""
    has_adapters = any(isinstance(module, Adapter) for module in model.modules())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not has_adapters or ".adapter." in name)
