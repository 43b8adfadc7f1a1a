"""A random model of transformers, written as a folder, and its results."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from .widened import computing_in


@attrs.frozen(kw_only=True)
class Reference:
    """The results of transformers on the samples of a trial, in float64."""

    folder: Path
    """The model."""
    gradients: Path
    """A folder of the same model that has gradients in place of weights: 0 where a parameter has
    none."""
    logits: Tensor
    """[B, S, V]."""
    loss: float
    """Mean over the trained tokens."""
    config: Mapping[str, Any]
    """As transformers reads it."""


def unknown_to_transformers(model_type: str, architecture: str) -> str:
    """Return why transformers cannot build a model of this type and class; empty if it can."""
    try:
        from transformers import __version__
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return "transformers is not installed"
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"transformers {__version__} has no causal model of the type '{model_type}'"
    built = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    if built != architecture:
        return f"transformers {__version__} has no {architecture}; '{model_type}' is a {built}"
    return ""


def random_model(model_type: str, values: Mapping[str, Any]) -> Any:
    """Build a random model in float64, with norms and biases unlike initial ones.

    Raises:
        Exception: Whatever transformers raises for a config that it cannot build.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    log: Any = logging
    log.disable_progress_bar()
    causal: Any = AutoModelForCausalLM
    given = copy.deepcopy({**values})  # transformers changes nested values
    torch.manual_seed(0)
    with computing_in(torch.float64):
        model = causal.from_config(AutoConfig.for_model(model_type, **given))
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the others have no float64
    with torch.no_grad():
        for tensor in model.state_dict().values():
            # Biases and norms, which are constant at first.
            if not tensor.is_floating_point():
                continue
            if tensor.dim() == 1 or tensor.min() == tensor.max():
                tensor += 0.3 * torch.randn_like(tensor)
            tensor.copy_(tensor.float())  # a built-in buffer may be float32
    return model


def computes(model: Any) -> None:
    """Run a forward, which raises what transformers does not check when it builds the model."""
    with computing_in(torch.float64), torch.no_grad():
        model(input_ids=torch.arange(8)[None])


def reference_of(model: Any, folder: Path, samples: Sequence[Mapping[str, Tensor]]) -> Reference:
    """Write a model and its gradients as folders, and compute its results on samples of a
    pretraining task. The model is of no use afterwards."""
    model.save_pretrained(folder / "model")
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    mask = batch["loss_mask"].double().flatten()
    with computing_in(torch.float64):
        logits = model(input_ids=batch["tokens"]).logits
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        loss.backward()
    # Saving renames and stacks tensors; it does the same with gradients.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_() if parameter.grad is None else parameter.copy_(parameter.grad)
        for buffer in model.buffers():
            buffer.zero_()
    model.save_pretrained(folder / "gradients")
    return Reference(
        folder=folder / "model",
        gradients=folder / "gradients",
        logits=logits.detach(),
        loss=float(loss.detach()),
        config=model.config.to_dict(),
    )
