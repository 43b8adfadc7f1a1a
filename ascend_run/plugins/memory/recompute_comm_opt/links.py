"""Links by which what backward repeats of a layer ends before the sum over tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from ascend_run.plugin_api import ForwardLink
from ascend_run.plugins.memory import Recomputation, recomputation_of, repeated_later
from ascend_run.types.forward import Forward

PROJECTION, LAST = "self_attention.linear_proj", "mlp.linear_fc2"
"""Row-parallel linears at the end of the attention and of the MLP."""


def layer_links(layer: Any, *, by_blocks: bool) -> dict[str, ForwardLink]:
    """Return the links of a layer; none if it is not recomputed, nor its MLP.

    Args:
        by_blocks: Whether a layer that is recomputed whole is recomputed by blocks instead.
    """
    links = {}
    whole = recomputation_of(layer)
    if whole and by_blocks:
        whole.in_blocks = True
        links[""] = ForwardLink(wrap=partial(_by_blocks, layer, whole), compilable=False)
        links[PROJECTION] = _without_sum(layer.self_attention.linear_proj, whole)
    around = whole or recomputation_of(layer.mlp)
    if around and not hasattr(layer.mlp, "router"):  # of experts, each token has its own sum
        links[LAST] = _without_sum(layer.mlp.linear_fc2, around)
    return links


def _by_blocks(layer: Any, how: Recomputation, inner: Forward) -> Forward:
    """Run Megatron's layer, whose attention and MLP each keep their own input.

    Raises:
        ValueError: Another link has replaced Megatron's forward.
    """
    own = type(layer).forward
    if getattr(inner, "__func__", None) is not own:
        found = getattr(inner, "__qualname__", type(inner).__qualname__)
        raise ValueError(
            "plugins.recompute-comm-opt.level=2 recomputes the attention and the MLP of "
            f"{own.__qualname__} one by one, and another plugin has replaced it by "
            f"{inner.__module__}.{found}; set plugins.recompute-comm-opt.level=1, or leave out "
            "that plugin"
        )

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        def attention(x: Tensor) -> tuple[Tensor, Tensor | None]:
            found: tuple[Tensor, Tensor | None] = layer._forward_attention(x, *args, **kwargs)
            return found

        given = kwargs.get("inference_context"), kwargs.get("padding_mask")

        def mlp(x: Tensor) -> Tensor:
            found: Tensor = layer._forward_mlp(x, given[0], padding_mask=given[1])
            return found

        between, context = repeated_later(how, attention, hidden_states)
        return repeated_later(how, mlp, between), context

    return forward


def _without_sum(linear: Any, how: Recomputation) -> ForwardLink:
    """Leave out the sum over ranks where a recomputation repeats the linear at its end.

    What follows in the part (bias, dropout, residual) is computed from a partial sum, of the shape
    of the sum. No gradient depends on its values: that of the sum is the gradient of each rank's
    product, all-gathered if the sum was scattered.
    """

    def wrap(inner: Forward) -> Forward:
        def forward(x: Tensor) -> tuple[Tensor, Tensor | None]:
            if not how.repeats:
                summed: tuple[Tensor, Tensor | None] = inner(x)
                return summed
            with _sum_left_to_caller(linear):
                product, bias = inner(x)
            if linear.sequence_parallel:
                product = scatter_to_sequence_parallel_region(product, group=linear.tp_group)
            return product, bias

        return forward

    return ForwardLink(wrap=wrap, compilable=False)


@contextmanager
def _sum_left_to_caller(linear: Any) -> Iterator[None]:
    """Have the linear return its rank's product, as those of experts do, by Megatron's switch."""
    linear.explicit_expert_comm = True
    try:
        yield
    finally:
        linear.explicit_expert_comm = False
