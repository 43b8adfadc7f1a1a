"""The attention window of each layer. Torch-free."""

from __future__ import annotations

from ascend_run.types.config import FieldSection


def layer_window(model: FieldSection, layer: int) -> tuple[int, int] | None:
    """Return how many keys a layer's queries attend to on each side; None for all.

    Args:
        layer: Layer slot in the whole model, from 0; a layer of multi-token prediction, which comes
            after all slots, has the window of the last slot.

    Source: ``window_attn_skip_freq`` as in Megatron's ``is_layer_window_attention``: of every n
    layers the last has no window, or a flag per layer.
    """
    if not model.window_size:
        return None
    every, layer = model.window_attn_skip_freq, min(layer, model.num_layers - 1)
    if every is not None:
        has_window = every[layer] if isinstance(every, tuple) else (layer + 1) % every
        if not has_window:
            return None
    left, right = model.window_size
    return left, right
