"""Our own keys of ``[model]``, beside Megatron's: what a GPT is beyond its transformer blocks."""

from __future__ import annotations

from typing import Any, Final

import attrs

from ascend_run.plugin_api.config import DEFAULT_FAMILY

from .rotary_keys import RotaryScalingKeys

_positive: Any = attrs.validators.gt(0)

ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "relu", "squared_relu")


def _proper_share(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{attribute.name} must be above 0 and at most 1")


@attrs.frozen(kw_only=True)
class ModelKeys(RotaryScalingKeys):
    """Merged into ``config.model``; a family's defaults may set any of them."""

    family: str = DEFAULT_FAMILY
    """Plugin of the group ``ascend_run.models``; Hugging Face's ``model_type``."""
    hf_path: str | None = None
    """Folder in Hugging Face's form to take the model's config and weights from."""
    vocab_size: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Tokens of the vocabulary, before padding; must be given."""
    make_vocab_size_divisible_by: int = attrs.field(default=128, validator=_positive)
    """Rows of the embedding are padded to a multiple of this times the tensor-parallel size."""
    position_embedding_type: str = attrs.field(
        default="rope", validator=attrs.validators.in_(("rope", "learned_absolute", "none"))
    )
    """``none`` leaves positions to a plugin that adds a bias, or to nobody."""
    rotary_base: float = attrs.field(default=10000.0, validator=_positive)
    rotary_percent: float = attrs.field(default=1.0, validator=_proper_share)
    """Share of a head's width that is rotated."""
    share_embeddings_and_output_weights: bool = False
    max_position_embeddings: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_positive)
    )
    """Longest sequence that the model is meant for; default: ``data.seq_length``. Unit: tokens."""
    activation: str = attrs.field(default="silu", validator=attrs.validators.in_(ACTIVATIONS))
    """Of the feed-forward, in place of Megatron's ``activation_func``, which is a function."""
    attn_logit_softcapping: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(_positive)
    )
    """Bound of the attention's scores: ``c * tanh(score / c)`` in place of each."""
