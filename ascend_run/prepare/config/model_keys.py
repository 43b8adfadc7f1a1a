"""Our own keys of ``[model]``: properties of a GPT model beyond its transformer blocks."""

from __future__ import annotations

from typing import Any, Final

import attrs

from ascend_run.core.config.built_in import QUICK_GELU_ALPHA
from ascend_run.core.config.rotary_keys import RotaryScalingKeys
from ascend_run.types.config import DEFAULT_FAMILY

_positive: Any = attrs.validators.gt(0)
_above_0: Any = attrs.validators.optional(_positive)

ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu")


def _proper_share(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{attribute.name} must be above 0 and at most 1")


@attrs.frozen(kw_only=True)
class ModelSwitchKeys(RotaryScalingKeys):
    """Switches of single families, usable by any."""

    rotary_local_base: float | None = attrs.field(default=None, validator=_above_0)
    """Rotary base of layers with a window, whose positions are not scaled; default: those of every
    layer are alike."""
    log_n_scaling_length: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.gt(1))
    )
    """Multiply the query of the n-th token by log(n) / log(this) where n is larger; default: by 1.
    Unit: tokens."""
    log_n_scaling_in_training: bool = True
    """Whether ``log_n_scaling_length`` acts in training, too, or in evaluation only."""
    embedding_layernorm: bool = False
    """Normalize the embeddings before the first layer, by the norm of ``normalization``."""
    latent_layernorm_epsilon: float | None = attrs.field(default=None, validator=_above_0)
    """Epsilon of the norms of latents; default: ``layernorm_epsilon``."""
    latent_rotary_interleaved: bool = True
    """Rotated pairs of multi-latent attention are adjacent; else half the rotated part apart."""
    add_router_bias: bool | None = None
    """Bias of the router's linear; default: as ``add_bias_linear``."""
    add_expert_bias: bool | None = None
    """Biases of the experts' linears; default: as ``add_bias_linear``."""
    add_output_bias: bool = False  #: Bias of the output layer.
    moe_sparsemixer_eps: float | None = attrs.field(default=None, validator=_above_0)
    """Select a token's experts one after the other, each weighed by a softmax over those whose
    logit is near the best (SparseMixer); twice this is the largest relative distance."""
    moe_sparsemixer_sampling: bool = False
    """Draw SparseMixer's experts from that softmax in training, else select the best."""
    quick_gelu_alpha: float = attrs.field(
        default=QUICK_GELU_ALPHA, validator=attrs.validators.gt(0)
    )
    """``activation`` quick_gelu is ``x * sigmoid(alpha * x)``."""
    normalize_output_rows: bool = False
    """Divide each row of the output layer's weight by its length, so that logits are cosines times
    the length of the hidden state."""


@attrs.frozen(kw_only=True)
class ModelKeys(ModelSwitchKeys):
    """Keys merged into ``config.model``; a family's defaults may set any of them."""

    family: str = DEFAULT_FAMILY
    """Plugin of the group ``ascend_run.models``; Hugging Face's ``model_type``."""
    hf_path: str | None = None
    """Hugging Face folder to load the model's config and weights from."""
    vocab_size: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Vocabulary size before padding; required. Unit: tokens."""
    make_vocab_size_divisible_by: int = attrs.field(default=128, validator=_positive)
    """Embedding rows are padded to a multiple of this times the tensor-parallel size."""
    position_embedding_type: str = attrs.field(
        default="rope", validator=attrs.validators.in_(("rope", "learned_absolute", "none"))
    )
    """``none`` applies no positions, unless a plugin adds a position bias."""
    rotary_base: float = attrs.field(default=10000.0, validator=_positive)
    rotary_percent: float = attrs.field(default=1.0, validator=_proper_share)
    """Fraction of a head's size to which RoPE is applied."""
    share_embeddings_and_output_weights: bool = False
    num_labels: int | None = attrs.field(default=None, validator=_above_0)
    """Scores of a head in place of the output layer, for models that rate text; default: none."""
    max_position_embeddings: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_positive)
    )
    """Maximum sequence length of the model; default: ``data.seq_length``. Unit: tokens."""
    activation: str = attrs.field(default="silu", validator=attrs.validators.in_(ACTIVATIONS))
    """Activation of the MLP; replaces Megatron's ``activation_func``, which is a function."""
    attn_logit_softcapping: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(_positive)
    )
    """Softcap of the attention scores: each becomes ``c * tanh(score / c)``."""
    final_logit_softcapping: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(_positive)
    )
    """Softcap of the logits."""
    add_linear_proj_bias: bool | None = None
    """Bias of the attention's output projection; default: as ``add_bias_linear``."""
    add_mlp_bias: bool | None = None
    """Biases of the dense MLP's linears; default: as ``add_bias_linear``."""
    norm_placement: str = attrs.field(
        default="pre", validator=attrs.validators.in_(("pre", "post", "both"))
    )
    """Norms of the attention and MLP blocks: of their inputs, of their outputs before these are
    added to the residual stream, or of both."""
    scale_embedding: bool = False
    """Multiply embeddings by the square root of ``hidden_size``."""
    embedding_multiplier: float = attrs.field(default=1.0, validator=_positive)
    """Factor on embeddings."""
    residual_multiplier: float = attrs.field(default=1.0, validator=_positive)
    """Factor on the output of each attention and MLP block. The factor on attention scores is
    Megatron's ``softmax_scale``."""
    logits_scaling: float = attrs.field(default=1.0, validator=_positive)
    """Divisor of the logits."""
