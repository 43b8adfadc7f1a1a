"""Split parameters over tensor-parallel ranks as Megatron does, and join them again.

Every function works on tensors of the device ``meta`` too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.core.config.linear_biases import linear_biases
from ascend_run.core.hugging_face.derived_fields import model_value
from ascend_run.core.hugging_face.parameter_rows import VOCABULARY_PARAMETERS
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.types.config import RunConfig

from .megatron_switches import switch_problems

LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERTS: Final = re.compile(r"decoder\.layers\.\d+\.mlp\.experts\.(fc[12](?:_bias)?)")


class Split(StrEnum):
    """Which axis of a parameter is divided."""

    NONE = "none"
    ROWS = "rows"
    GATED_ROWS = "gated rows"
    """Gate and up projection, each divided by rows: a rank has [its gate; its up]."""
    COLUMNS = "columns"
    VOCABULARY = "vocabulary"
    """Rows, padded to a multiple that depends on the number of ranks."""


_ROWS: Final = re.compile(
    r"self_attention\.(linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj"
    r"|linear_qk_nope|linear_qk_rope|linear_kv_nope|linear_v)\.(weight|bias)"
)
_DOWN: Final = re.compile(r"self_attention\.linear_(q|kv)_down_proj\.weight")
_LATENT_QKV: Final = "self_attention.linear_qkv.weight"
"""MindSpeed's down projections of queries, keys and values in one."""
_FC1: Final = re.compile(r"mlp\.(shared_experts\.)?linear_fc1\.(weight|bias)")
_COLUMNS: Final = re.compile(
    r"(self_attention\.linear_proj|mlp\.(shared_experts\.)?linear_fc2)\.weight"
)
_REPLICATED: Final = re.compile(
    r"self_attention\.(linear_proj\.bias|(q|k|kv)_layernorm\.(weight|bias))"
    r"|mlp\.(linear_fc2\.bias|router\.(weight|expert_bias)|shared_experts\.gate_weight)"
    r"|(input|pre_mlp)_layernorm\.(weight|bias)"
)
_SINKS: Final = "self_attention.core_attention.softmax_offset"
_ROUTER_BIAS: Final = "mlp.router.bias"
_REPLICATED_OUTSIDE: Final = frozenset(
    {
        "embedding.position_embeddings.weight",
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias",
    }
)


def require_known(names: Iterable[str], config: RunConfig, target: str) -> None:
    """Check that Megatron's GPTModel has these parameters, with known shards, and computes the same
    with them.

    Raises:
        CheckpointError: Lists all problems.
    """
    unknown = [
        f"parameter {name} does not exist in Megatron's GPTModel"
        for name in names
        if EXPERTS.fullmatch(name) is None and split_of(name, config) is None
    ]
    if unknown := unknown + switch_problems(config):
        raise CheckpointError(
            f"this model cannot be written as {target}; use --to hf or --to ascend-run", unknown
        )


def split_of(name: str, config: RunConfig, *, engine: bool = False) -> Split | None:
    """Return how a parameter is divided; None if Megatron's GPTModel has no such parameter.

    Args:
        name: As in our GPTModel, or of MindSpeed's latent attention; not of routed experts.
        engine: In Transformer Engine's modules, which replicate the down projections of latent
            attention. Source: megatron-core 0.16, ``MLASelfAttention.__init__``.
    """
    if name in VOCABULARY_PARAMETERS:
        return Split.VOCABULARY
    if name in _REPLICATED_OUTSIDE:
        return Split.NONE
    inner = LAYER.fullmatch(name)
    rest = inner[2] if inner else ""
    if config.model.multi_latent_attention and rest == _LATENT_QKV:
        return Split.NONE
    if rest == _SINKS and config.model.softmax_type == "learnable":
        return Split.ROWS
    if rest == _ROUTER_BIAS and linear_biases(config.model).router:
        return Split.NONE
    if _DOWN.fullmatch(rest):
        return Split.NONE if engine else Split.ROWS
    if _FC1.fullmatch(rest):
        return Split.GATED_ROWS if config.model.gated_linear_unit else Split.ROWS
    for pattern, split in ((_ROWS, Split.ROWS), (_COLUMNS, Split.COLUMNS)):
        if pattern.fullmatch(rest):
            return split
    return Split.NONE if _REPLICATED.fullmatch(rest) else None


def stored_split(name: str, rows: int, config: RunConfig) -> Split | None:
    """Return how a parameter is divided whose shard has this number of rows; see ``split_of``."""
    shape = expected_shape(name, config)
    return split_of(name, config, engine=shape is not None and shape[0] == rows)


def divided(size: int, split: Split, parts: int, config: RunConfig, name: str) -> str | None:
    """Return what is wrong with dividing an axis of ``size`` into ``parts``; None if nothing is."""
    if split is Split.NONE or split is Split.VOCABULARY or parts == 1:
        return None
    if config.model.multi_latent_attention and "self_attention." in name and not _DOWN.search(name):
        heads = config.model.num_attention_heads
        return f"{heads} attention heads are not divisible by tp={parts}" if heads % parts else None
    if "linear_qkv" in name:
        groups = model_value(config, "num_query_groups")
        if (groups % parts and parts % groups) or size % parts:
            return f"{groups} key-value groups are neither split nor shared evenly by tp={parts}"
        return None
    each = size // 2 if split is Split.GATED_ROWS else size
    if each % parts:
        return f"{each} of {name} are not divisible by tp={parts}"
    return None


def shard(tensor: Tensor, split: Split, rank: int, parts: int) -> Tensor:
    """Return a rank's shard, a view where possible. The vocabulary must be padded."""
    if split is Split.NONE or parts == 1:
        return tensor
    if split is Split.GATED_ROWS:
        return torch.cat([half.chunk(parts)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(parts, dim=1 if split is Split.COLUMNS else 0)[rank]


def join(shards: Sequence[Tensor], split: Split) -> Tensor:
    """Return the full tensor; the inverse of ``shard`` over all ranks."""
    if split is Split.NONE or len(shards) == 1:
        return shards[0]
    if split is Split.GATED_ROWS:
        halves = [part.chunk(2) for part in shards]
        return torch.cat([half[n] for n in (0, 1) for half in halves])
    return torch.cat([*shards], dim=1 if split is Split.COLUMNS else 0)


def vocabulary_shard(tensor: Tensor, rank: int, rows: int) -> Tensor:
    """Return rows ``rank * rows`` to ``(rank + 1) * rows``; those beyond the tensor are 0."""
    held = tensor[rank * rows : (rank + 1) * rows]
    return held if len(held) == rows else F.pad(held, (0, 0, 0, rows - len(held)))


def expected_shape(name: str, config: RunConfig) -> tuple[int, ...] | None:
    """Return the shape of a full parameter of the usual layers; None if it is not known here.

    For the vocabulary, the rows without padding.
    """
    model = config.model
    hidden = model.hidden_size
    if name in VOCABULARY_PARAMETERS:
        return (model.vocab_size, hidden)
    inner = LAYER.fullmatch(name)
    rest = inner[2] if inner else name.removeprefix("decoder.")
    if re.fullmatch(r"(input|pre_mlp|final)_layernorm\.(weight|bias)", rest):
        return (hidden,)
    ffn = model_value(config, "ffn_hidden_size")
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.linear_fc1": (ffn * (2 if model.gated_linear_unit else 1), hidden),
        "mlp.linear_fc2": (hidden, ffn),
        _SINKS.rpartition(".")[0]: (model.num_attention_heads,),
        **(_latent_shapes(config) if model.multi_latent_attention else _attention_shapes(config)),
    }
    module, _, kind = rest.rpartition(".")
    shape = shapes.get(module)
    return shape[:1] if shape and kind == "bias" else shape


def _attention_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    groups, width = model_value(config, "num_query_groups"), model_value(config, "kv_channels")
    return {
        "self_attention.linear_qkv": ((heads + 2 * groups) * width, hidden),
        "self_attention.linear_proj": (hidden, heads * width),
    }


def _latent_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    queries, latent = model.q_lora_rank or 0, model.kv_lora_rank
    nope, rope, values = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "linear_qkv": ((queries or heads * (nope + rope)) + latent + rope, hidden),
        "linear_q_proj": (heads * (nope + rope), hidden),
        "linear_q_down_proj": (queries, hidden),
        "linear_q_up_proj": (heads * (nope + rope), queries),
        "linear_qk_nope": (heads * nope, queries),
        "linear_qk_rope": (heads * rope, queries),
        "linear_kv_down_proj": (latent + rope, hidden),
        "linear_kv_up_proj": (heads * (nope + values), latent),
        "linear_kv_nope": (heads * nope, latent),
        "linear_v": (heads * values, latent),
        "linear_proj": (hidden, heads * values),
        "q_layernorm": (queries,),
        "kv_layernorm": (latent,),
    }
    return {f"self_attention.{name}": shape for name, shape in shapes.items()}
