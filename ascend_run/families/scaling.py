"""Factors that keep width and depth scaling stable, as in MiniCPM."""

from __future__ import annotations

from ascend_run.plugin_api import ConfigKey

from .forms import BASE_WIDTH, OVER_DEPTH


def scaling_factors(embedding: float, depth: float, base_width: int) -> tuple[ConfigKey, ...]:
    """Return the keys of the factors on embeddings, residual branches and logits.

    Args:
        embedding, depth, base_width: Defaults of ``scale_emb``, ``scale_depth`` (divided by the
            square root of the number of layers) and ``dim_model_base`` (the hidden size is divided
            by it).
    """
    return (
        ConfigKey(hf="scale_emb", field="model.embedding_multiplier", default=embedding),
        ConfigKey(
            hf="scale_depth", field="model.residual_multiplier", default=depth, form=OVER_DEPTH
        ),
        ConfigKey(
            hf="dim_model_base", field="model.logits_scaling", default=base_width, form=BASE_WIDTH
        ),
    )
