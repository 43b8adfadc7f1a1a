"""MindSpeed's modules of multi-latent attention, and Megatron's.

MindSpeed has the down projections of queries, keys and values in one ``linear_qkv``, replicated
over tensor-parallel ranks. With ``--mla-mm-split`` it divides each up projection in two: the part
of every head with and the one without rotary positions, or keys and values. A parameter here is
built from others, by functions that work on tensors of the device ``meta`` too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.types.config import RunConfig

# N = heads, R = rank of the latent, a and b = two parts of a head

Read = Callable[[str], Tensor]
"""Reads a parameter by name, or its shape from the device ``meta``."""

_ATTENTION: Final = re.compile(r"(decoder\.layers\.\d+\.self_attention\.)(.+)\.weight")
_FORMER: Final = {"k_layernorm": "kv_layernorm"}
"""Module of MindSpeed's earlier releases, which plain attention has, too."""
_HALVES: Final = {
    "linear_q_up_proj": ("linear_qk_nope", "linear_qk_rope"),
    "linear_kv_up_proj": ("linear_kv_nope", "linear_v"),
}


def require_megatron_attention(config: RunConfig) -> None:
    """Check that Megatron's own latent attention computes this model.

    Source: megatron-core 0.16, ``MLASelfAttention`` and ``_apply_rotary_pos_emb_bshd``.

    Raises:
        CheckpointError: Lists all problems.
    """
    model = config.model
    if not model.multi_latent_attention:
        return
    problems = []
    own = model.latent_layernorm_epsilon
    if own is not None and own != model.layernorm_epsilon:
        problems.append(
            f"model.latent_layernorm_epsilon={own} with "
            f"model.layernorm_epsilon={model.layernorm_epsilon}: its norms of latents have the "
            "epsilon of the other norms"
        )
    if not model.latent_rotary_interleaved:
        problems.append(
            "model.latent_rotary_interleaved=false: it rotates adjacent pairs, and those of this "
            "model are half the rotated part apart"
        )
    if problems:
        raise CheckpointError(
            "Megatron's latent attention does not compute this model; use --to mp-rank "
            "--mla-qkv-concat, for MindSpeed",
            problems,
        )


@attrs.frozen
class BuiltParameters:
    """Parameters that are read from those of another layout."""

    headers: Mapping[str, Tensor]
    builders: Mapping[str, Callable[[Read], Tensor]]
    source: Read

    def read(self, name: str) -> Tensor:
        return self.builders[name](self.source)


def with_megatron_modules(
    headers: Mapping[str, Tensor], read: Read, config: RunConfig
) -> BuiltParameters:
    """Return the parameters of a model under the names of Megatron's modules.

    Args:
        headers, read: Parameters of either layout.

    Raises:
        CheckpointError: One half of an up projection is missing.
    """
    builders: dict[str, Callable[[Read], Tensor]] = {}
    for name in headers:
        match = _ATTENTION.fullmatch(name) if config.model.multi_latent_attention else None
        if match is None:
            builders[name] = _copy(name)
            continue
        at, module = match.groups()
        if module == "linear_qkv":
            builders |= _separate(at, name, config)
            continue
        whole = next((whole for whole, halves in _HALVES.items() if module in halves), None)
        if whole is None:
            builders[f"{at}{_FORMER.get(module, module)}.weight"] = _copy(name)
        else:
            builders[f"{at}{whole}.weight"] = _joined(at, whole, config)
    try:
        built = {name: build(headers.__getitem__) for name, build in builders.items()}
    except KeyError as missing:
        raise CheckpointError(f"{missing.args[0]} is missing, a half of a projection") from None
    return BuiltParameters(built, builders, read)


def with_mindspeed_modules(
    headers: Mapping[str, Tensor], read: Read, config: RunConfig, *, mm_split: bool
) -> BuiltParameters:
    """Return the parameters of a model under the names of MindSpeed's modules.

    Args:
        headers, read: Parameters of Megatron's modules.
        mm_split: Divide the up projections, as ``--mla-mm-split`` does.
    """
    builders: dict[str, Callable[[Read], Tensor]] = {}
    for name in headers:
        match = _ATTENTION.fullmatch(name)
        at, module = match.groups() if match else ("", "")
        if module in ("linear_q_proj", "linear_q_down_proj"):
            continue
        if module == "linear_kv_down_proj":
            queries = "linear_q_down_proj" if config.model.q_lora_rank else "linear_q_proj"
            builders[f"{at}linear_qkv.weight"] = _concatenated(f"{at}{queries}.weight", name)
        elif mm_split and module in _HALVES:
            for half, inner in enumerate(_HALVES[module]):
                builders[f"{at}{inner}.weight"] = _half(name, half, module, config)
        else:
            builders[name] = _copy(name)
    built = {name: build(headers.__getitem__) for name, build in builders.items()}
    return BuiltParameters(built, builders, read)


def _copy(name: str) -> Callable[[Read], Tensor]:
    return lambda read: read(name)


def _concatenated(first: str, second: str) -> Callable[[Read], Tensor]:
    return lambda read: torch.cat([read(first), read(second)])


def _separate(at: str, name: str, config: RunConfig) -> dict[str, Callable[[Read], Tensor]]:
    """Return the queries' and the other rows of ``linear_qkv``."""
    model = config.model
    rows = model.kv_lora_rank + model.qk_pos_emb_head_dim
    queries = "linear_q_down_proj" if model.q_lora_rank else "linear_q_proj"
    return {
        f"{at}{queries}.weight": lambda read: read(name)[:-rows],
        f"{at}linear_kv_down_proj.weight": lambda read: read(name)[-rows:],
    }


def _parts(module: str, config: RunConfig) -> tuple[int, int]:
    """Return a and b of a head."""
    model = config.model
    second = model.qk_pos_emb_head_dim if module == "linear_q_up_proj" else model.v_head_dim
    return model.qk_head_dim, second


def _joined(at: str, module: str, config: RunConfig) -> Callable[[Read], Tensor]:
    names = [f"{at}{half}.weight" for half in _HALVES[module]]
    widths = _parts(module, config)

    def build(read: Read) -> Tensor:
        halves = [_heads(read(name), width) for name, width in zip(names, widths, strict=True)]
        return torch.cat(halves, dim=1).flatten(0, 1)  # [N, a + b, R] -> [N * (a + b), R]

    return build


def _half(name: str, half: int, module: str, config: RunConfig) -> Callable[[Read], Tensor]:
    widths = _parts(module, config)

    def build(read: Read) -> Tensor:
        a, b = _heads(read(name), sum(widths)).tensor_split([widths[0]], dim=1)
        return (a, b)[half].flatten(0, 1)

    return build


def _heads(tensor: Tensor, width: int) -> Tensor:
    """Return [N * width, R] as [N, width, R]."""
    return tensor.reshape(-1, width, tensor.shape[1])
