"""LoRA: ``y = W x + scale * B A x`` with A and B trained, W frozen.

Sources: arXiv:2106.09685, scale ``alpha / r``; arXiv:2312.03732, scale ``alpha / sqrt(r)``.
"""

# shapes: see the package

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from ascend_run.types.config import RunConfig

from .attention import SelfAttention
from .experts import Experts, MoE
from .latent import LatentAttention
from .layers import MLP, Linear

_LATENT_LINEARS: Final = (
    "linear_q_proj",
    *("linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj"),
)
"""Projections of multi-latent attention before its heads; a model has some of them."""


class Adapter(nn.Module):
    """The adapters of one linear, one for each projection that it fuses.

    ``lora_A`` holds the A of each adapted projection below one another; ``lora_B`` has the B of
    each, with the projection's own rows, and ``lora_magnitude`` DoRA's norms of these.

    Args:
        linear: Name of the linear.
        rows: Projection -> its rows in the linear. The linear holds them in turn for each group.
        groups: Key-value groups for ``linear_qkv``, else 1.
        adapted: Projections that have an adapter.
    """

    def __init__(
        self,
        config: RunConfig,
        linear: str,
        width: int,
        rows: Mapping[str, int],
        groups: int,
        adapted: frozenset[str],
    ) -> None:
        super().__init__()
        options = config.plugins["lora"]
        self.rows, self.groups = rows, groups
        self.ranks: dict[str, int] = {}
        self.scales: dict[str, float] = {}
        for name in rows:
            if name in adapted:
                rank, alpha = (
                    next((pattern[n] for n in _names(name, linear) if n in pattern), default)
                    for pattern, default in (
                        (options.rank_pattern, options.rank),
                        (options.alpha_pattern, options.alpha),
                    )
                )
                self.ranks[name] = rank
                self.scales[name] = alpha / (math.sqrt(rank) if options.rslora else rank)
        self.lora_magnitude: nn.ParameterDict | None = None
        if options.dora:
            self.lora_magnitude = nn.ParameterDict({n: torch.empty(rows[n]) for n in self.ranks})
        self.lora_A = nn.Parameter(torch.empty(sum(self.ranks.values()), width))
        self.lora_B = nn.ParameterDict(
            {name: torch.empty(rows[name], rank) for name, rank in self.ranks.items()}
        )

    def forward(self, x: Tensor) -> Tensor:
        blocks = (x @ self.lora_A.t()).split([*self.ranks.values()], -1)
        inner = dict(zip(self.ranks, blocks, strict=True))
        outputs = [
            (
                self.scales[name] * (inner[name] @ self.lora_B[name].t())
                if name in inner
                else x.new_zeros(*x.shape[:-1], n)
            )
            for name, n in self.rows.items()
        ]
        return self._in_turn(outputs)

    def output(self, weight: Tensor, x: Tensor) -> Tensor:
        """Return ``W x`` with the adapters, without a bias.

        With magnitudes m (DoRA), a row of ``W + scale * B A`` has the norm m. The norm that it had
        is not differentiated, arXiv:2402.09353, section 4.3.
        """
        y: Tensor = x @ weight.t() + self(x)
        if self.lora_magnitude is None:
            return y
        with torch.no_grad():
            update = self(torch.eye(weight.shape[1], dtype=weight.dtype)).t()
            norms = (weight + update).square().sum(dim=1).sqrt()
        given: dict[str, Tensor] = dict(self.lora_magnitude.items())
        factors = self._in_turn([given.get(n, norms.new_ones(k)) for n, k in self.rows.items()])
        scaled = self._in_turn([norms.new_full((k,), n in given) for n, k in self.rows.items()])
        return torch.where(scaled > 0, y * (factors / norms), y)

    def _in_turn(self, parts: list[Tensor]) -> Tensor:
        """Return the rows of projections in the order of the linear: in turn for each group."""
        by_group = [part.unflatten(-1, (self.groups, -1)) for part in parts]
        return torch.cat(by_group, dim=-1).flatten(-2)


class ExpertAdapter(nn.Module):
    """The adapters of a layer's experts: for each expert, ``scale * B A x`` beside ``W x``.

    ``lora_A`` is [X, R, in] and ``lora_B`` [X, out, R], with a gate's rows apart from those of up.

    Args:
        shapes: Name of an adapted weight -> [X, out, in].
        gated: Whether the first one's rows are in two blocks.
    """

    def __init__(self, config: RunConfig, shapes: Mapping[str, torch.Size], *, gated: bool) -> None:
        super().__init__()
        options = config.plugins["lora"]
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.scales: dict[str, float] = {}
        self.blocks: dict[str, list[str]] = {}
        for name, (experts, rows, columns) in shapes.items():
            rank, alpha = (
                pattern.get(name, pattern.get("experts", default))
                for pattern, default in (
                    (options.rank_pattern, options.rank),
                    (options.alpha_pattern, options.alpha),
                )
            )
            self.scales[name] = alpha / (math.sqrt(rank) if options.rslora else rank)
            halves = gated and name == "experts_fc1"
            self.blocks[name] = [f"{name}_gate", f"{name}_up"] if halves else [name]
            self.lora_A[name] = nn.Parameter(torch.empty(experts, rank, columns))
            for block in self.blocks[name]:
                empty = torch.empty(experts, rows // len(self.blocks[name]), rank)
                self.lora_B[block] = nn.Parameter(empty)

    def forward(self, name: str, expert: int, x_CK: Tensor) -> Tensor | float:
        """Return what is added to the output of one expert's weight; 0 if it has no adapter."""
        if name not in self.scales:
            return 0.0
        inner = x_CK @ self.lora_A[name][expert].t()
        outputs = [inner @ self.lora_B[block][expert].t() for block in self.blocks[name]]
        return self.scales[name] * torch.cat(outputs, dim=-1)


def add_adapters(layers: nn.ModuleList, config: RunConfig) -> None:
    """Add the adapters of a model's layers, if the run has any."""
    if "lora" not in config.enable:
        return
    hidden = config.model.hidden_size
    for layer in layers:
        attention, mlp = layer.self_attention, layer.mlp
        if isinstance(attention, SelfAttention):
            groups, keys = attention.groups, attention.groups * attention.width
            rows = {"linear_q": attention.shared * keys, "linear_k": keys, "linear_v": keys}
            _adapt(attention.linear_qkv, "linear_qkv", config, rows, groups)
        elif isinstance(attention, LatentAttention):
            for name in _LATENT_LINEARS:
                if (linear := getattr(attention, name, None)) is not None:
                    _adapt(linear, name, config, {name: len(linear.weight)})
        if isinstance(attention, SelfAttention | LatentAttention):
            _adapt(attention.linear_proj, "linear_proj", config, {"linear_proj": hidden})
        if isinstance(mlp, MLP):
            _adapt_mlp(mlp, "linear", hidden, config)
        elif isinstance(mlp, MoE):
            _adapt_experts(mlp.experts, config)
            if mlp.shared_experts is not None:
                _adapt_mlp(mlp.shared_experts, "shared_experts", hidden, config)


def _adapt_mlp(mlp: MLP, prefix: str, hidden: int, config: RunConfig) -> None:
    """Add the adapters of an MLP, or of shared experts, by their prefix in the names of options."""
    total, fc1 = len(mlp.linear_fc1.weight), f"{prefix}_fc1"
    rows = {fc1: total}
    if mlp.activation.is_gated:
        rows = {f"{fc1}_gate": total // 2, f"{fc1}_up": total // 2}
    _adapt(mlp.linear_fc1, fc1, config, rows)
    _adapt(mlp.linear_fc2, f"{prefix}_fc2", config, {f"{prefix}_fc2": hidden})


def _adapt_experts(experts: Experts, config: RunConfig) -> None:
    """Add the adapters of a layer's experts if they, or one of their weights, are targets."""
    targets = {*config.plugins["lora"].target_modules}
    weights = {"experts_fc1": experts.fc1, "experts_fc2": experts.fc2}
    shapes = {n: w.shape for n, w in weights.items() if targets & {"experts", n}}
    if shapes:
        gated = experts.activation.is_gated
        experts.adapter = ExpertAdapter(config, shapes, gated=gated)


def _adapt(
    linear: Linear, name: str, config: RunConfig, rows: Mapping[str, int], groups: int = 1
) -> None:
    """Add the adapter of one linear if it, or one of its projections, is a target."""
    targets = {*config.plugins["lora"].target_modules}
    named = {part: {"all-linear", *_names(part, name)} for part in rows}
    adapted = frozenset(part for part, names in named.items() if targets & names)
    if adapted:
        linear.adapter = Adapter(config, name, linear.weight.shape[1], rows, groups, adapted)


def _names(part: str, linear: str) -> list[str]:
    """Return what means a part in options, from its own name to the one with most meanings."""
    own = [part, linear]
    if not part.startswith("shared_experts"):
        return own
    return [*own, "shared_experts", *(n.replace("shared_experts", "linear") for n in own)]


def freeze_all_but_adapters(model: nn.Module, config: RunConfig) -> None:
    """Train adapters, and the modules that are trained in full beside them, if there are any."""
    if "lora" not in config.enable:
        return
    modules = {*config.plugins["lora"].modules_to_save}
    for name, parameter in model.named_parameters():
        *owners, module, _ = name.split(".")
        in_full = module in modules and owners[:1] != ["mtp"]
        parameter.requires_grad_(in_full or ".adapter." in name)
