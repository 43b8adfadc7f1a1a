"""The families of the parametrised suite, with options off their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn

from tests.support.against_transformers import VOCAB
from tests.support.decoder_layout import NORMS, Tensors, decoder_layout

TINY: Final = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,  # its row of the embedding would have no gradient
}
BASE_500: Final = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
LINEAR: Final = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 3.0}}


@attrs.frozen(kw_only=True)
class Family:
    """One family: what transformers builds, and variants of it."""

    name: str
    """Name of our plugin."""
    variants: Mapping[str, Mapping[str, Any]]
    """Label -> changes of the config; together they move every option off its default."""
    common: Mapping[str, Any] = attrs.field(factory=dict)
    """Changes of every variant."""
    norms: Mapping[str, str] = attrs.field(factory=lambda: NORMS)
    zero_centered: bool = False
    """The norms multiply by 1 + weight."""
    required: frozenset[str] = frozenset()
    """Required keys of config.json, beside those of every decoder."""

    @property
    def reference(self) -> str:
        """Return transformers' ``model_type`` of the same architecture."""
        return self.name

    def model(self, **changes: Any) -> nn.Module:
        """Build a random model with norms and biases unlike initial ones."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        given = {**TINY, **self.common, **changes}
        model: nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(self.reference, **given)
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    shift = 1.0 if self.zero_centered else 0.0
                    parameter.uniform_(0.5 - shift, 1.5 - shift)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.3)
        return model

    def in_our_layout(self, theirs: dict[str, Tensor], config: Any) -> Tensors:
        """Rename transformers' tensors to ours."""
        return decoder_layout(theirs, config, self.norms)


FAMILIES: Final = (
    Family(
        name="llama",
        variants={
            "biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
            "attention bias, tied": {"attention_bias": True, "tie_word_embeddings": True},
            "mlp bias": {"mlp_bias": True, **LINEAR},
        },
    ),
    Family(
        name="qwen2",
        variants={
            "plain": {"rms_norm_eps": 1e-2, **BASE_500},
            "tied, one group": {"tie_word_embeddings": True, "num_key_value_heads": 1, **LINEAR},
        },
    ),
    Family(
        name="qwen3",
        common={"head_dim": 12},
        variants={
            "plain": {"rms_norm_eps": 1e-2, **BASE_500},
            "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, **LINEAR},
        },
    ),
)
BY_NAME: Final = {family.name: family for family in FAMILIES}
CASES: Final[Mapping[str, tuple[Family, Mapping[str, Any]]]] = {
    f"{family.name}: {label}": (family, changes)
    for family in FAMILIES
    for label, changes in family.variants.items()
}
Layout = Callable[[Tensors, Any], Tensors]
