"""Modules that are trained in full beside the adapters: PEFT's ``modules_to_save``. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from .peft_names import PEFT_NAMES
from .targets import LINEARS

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import LoraOptions

EMBEDDING: Final = "word_embeddings"
OUTPUT_LAYER: Final = "output_layer"
SCORE: Final = "score"
"""The score head of a model that has one in place of an output layer. It begins at random, so it is
always trained, as PEFT's models for ``SEQ_CLS`` do."""
TIED: Final = ("model.embed_tokens.weight", "lm_head.weight")
"""Names of a tied embedding in PEFT's files, which have it twice."""
VOCABULARY: Final = (EMBEDDING, OUTPUT_LAYER)
"""Modules whose rows are tokens, sharded over tensor-parallel ranks with padding."""

_DENSE: Final[Mapping[str, str]] = {
    EMBEDDING: "model.embed_tokens",
    OUTPUT_LAYER: "lm_head",
    SCORE: "score",
    "final_layernorm": "model.norm",
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
_LATENT: Final[Mapping[str, str]] = {
    **_DENSE,
    "q_layernorm": "self_attn.q_a_layernorm",
    "kv_layernorm": "self_attn.kv_a_layernorm",
}
_ROUTER: Final[Mapping[str, str]] = {"router": "mlp.gate"}
_NORMED_OUTPUTS: Final = {**_DENSE, "pre_mlp_layernorm": "pre_feedforward_layernorm"}
PEFT_MODULES: Final[Mapping[str, Mapping[str, str]]] = {
    **dict.fromkeys(PEFT_NAMES, _DENSE),
    "gemma2": _NORMED_OUTPUTS,
    "gemma3_text": _NORMED_OUTPUTS,
    "mixtral": {**_DENSE, **_ROUTER},
    "deepseek": {**_LATENT, **_ROUTER},
    "deepseek_v2": {**_LATENT, **_ROUTER},
    "deepseek_v3": _LATENT,  # the router of which has a bias that is no parameter
    "minicpm3": _LATENT,
}
"""Model family -> module -> module of Hugging Face's model, or in a layer of it."""

_COST_KEYS: Final[Mapping[str, str]] = {
    EMBEDDING: "embedding.word_embeddings",
    "position_embeddings": "embedding.position_embeddings",
    OUTPUT_LAYER: "output_layer.weight",
    SCORE: "output_layer.weight",
    "final_layernorm": "final_norm.weight",
    "input_layernorm": "input_norm.weight",
    "pre_mlp_layernorm": "mlp_norm.weight",
    "q_layernorm": "self_attention.q_layernorm",
    "k_layernorm": "self_attention.k_layernorm",
    "kv_layernorm": "self_attention.kv_layernorm",
    "router": "router.weight",
}
"""Module -> key of its weight in ``PipelineStage.parameters``; a bias's has a suffix."""


def known_modules(config: RunConfig) -> list[str]:
    """Return every name that ``modules_to_save`` accepts for this model."""
    model = config.model
    latent, by_head = bool(model.multi_latent_attention), bool(model.qk_layernorm)
    before = model.norm_placement in ("pre", "both")
    present = {
        EMBEDDING: True,
        "position_embeddings": model.position_embedding_type == "learned_absolute",
        OUTPUT_LAYER: not (is_tied(config) or model.num_labels),
        SCORE: bool(model.num_labels),
        "final_layernorm": before,
        "input_layernorm": before,
        "pre_mlp_layernorm": before,
        "q_layernorm": by_head and (not latent or bool(model.q_lora_rank)),
        "k_layernorm": by_head and not latent,
        "kv_layernorm": by_head and latent,
        "router": bool(model.num_moe_experts),
    }
    return [name for name, has in present.items() if has]


def modules_in_full(config: RunConfig, options: LoraOptions) -> frozenset[str]:
    """Return the modules that an adapter's files have in full: those named, and a score head."""
    return frozenset(options.modules_to_save).union([SCORE] if config.model.num_labels else ())


def saved_modules(config: RunConfig, options: LoraOptions) -> frozenset[str]:
    """Return the modules that are trained in full; a tied output layer is the embedding."""
    names = {*modules_in_full(config, options)}
    if EMBEDDING in names and is_tied(config):
        names.add(OUTPUT_LAYER)
    return frozenset(names)


def frozen_parts(keys: Iterator[str], config: RunConfig, options: LoraOptions) -> tuple[str, ...]:
    """Return the keys of the cost model's parameters that are not trained."""
    kept = {_COST_KEYS[name] for name in saved_modules(config, options)}
    if not kept:
        return ("*",)
    trained = {name for key in kept for name in (key, f"{key}_bias")}
    return tuple(dict.fromkeys(key for key in keys if key not in trained))


def peft_modules(config: RunConfig, options: LoraOptions) -> list[str]:
    """Return what selects the modules in PEFT's settings: the ends of their names."""
    names = PEFT_MODULES[config.model.family]
    return sorted(names[name] for name in modules_in_full(config, options))


def peft_name(module: str, layer: int | None, family: str) -> str:
    """Return the name of a module in Hugging Face's model; ``layer`` is None outside of layers."""
    name = PEFT_MODULES[family][module]
    return name if layer is None else f"model.layers.{layer}.{name}"


def module_of(name: str, family: str) -> str | None:
    """Return the module that a module of Hugging Face's model is, None if unknown."""
    for module, theirs in PEFT_MODULES[family].items():
        if name == theirs or (name.startswith("model.layers.") and name.endswith(f".{theirs}")):
            return module
    return None


def module_problems(config: RunConfig, options: LoraOptions) -> Iterator[str]:
    """Yield the names that no module of this model has, and those that are trained already."""
    known, given = known_modules(config), options.modules_to_save
    adapted = {linear.rpartition(".")[2] for linear in LINEARS}.union(*LINEARS.values())
    for name in dict.fromkeys(given):
        if given.count(name) > 1:
            yield f"plugins.lora.modules_to_save names {name!r} twice; expected it once"
        if name in adapted:
            yield (
                f"plugins.lora.modules_to_save names {name!r}, a linear that takes an adapter; "
                "expected it in plugins.lora.target_modules alone"
            )
        elif name == OUTPUT_LAYER and config.model.num_labels:
            yield (
                f"plugins.lora.modules_to_save names {name!r}, in whose place this model has a "
                f"score head (model.num_labels={config.model.num_labels}), which is always trained "
                "in full; leave the name out"
            )
        elif name == OUTPUT_LAYER and is_tied(config):
            yield (
                f"plugins.lora.modules_to_save names {name!r}, which is tied to {EMBEDDING} "
                "(model.share_embeddings_and_output_weights=true) and would be trained twice; "
                f"name {EMBEDDING}"
            )
        elif name not in known:
            yield (
                f"plugins.lora.modules_to_save names {name!r}; expected some of {', '.join(known)}"
            )


def unnamed(config: RunConfig, options: LoraOptions) -> list[str]:
    """Return the modules whose name in Hugging Face's model is not known."""
    names = PEFT_MODULES.get(config.model.family, {})
    return [name for name in options.modules_to_save if name not in names]


def is_tied(config: RunConfig) -> bool:
    """Return whether the output layer is the embedding; a score head, which replaces it, is not."""
    model = config.model
    return bool(model.share_embeddings_and_output_weights and not model.num_labels)
