"""The forward of an MLP that computes the adapters of its linears too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ascend_run.ops.late_parameters import await_parameters
from ascend_run.ops.linear.adapted_mlp import AdaptedMlp, MlpLinear, adapted_mlp
from ascend_run.ops.linear.linear_adapter import LinearAdapter, LinearWithAdapter, adapter_of
from ascend_run.ops.linear.parallel_linear import LinearCollectives, LinearForward, own_forward
from ascend_run.plugin_api import Forward, ForwardLink


def link(mlp: Any) -> nn.Module | ForwardLink:
    """Return the link that computes a dense MLP; the MLP if a linear has no adapter, as in layers
    of multi-token prediction."""
    if adapter_of(mlp.linear_fc1) is None or adapter_of(mlp.linear_fc2) is None:
        unchanged: nn.Module = mlp
        return unchanged
    return ForwardLink(wrap=lambda inner: _Fused(mlp, inner), compilable=False)


class _Fused:
    """The forward of one MLP.

    Args:
        mlp: Megatron's MLP; the links of its linears are in place.
        inner: Its own forward, for when its adapters are off.
    """

    def __init__(self, mlp: Any, inner: Forward) -> None:
        self._mlp, self._inner = mlp, inner
        self._linears = [_with_adapter(linear) for linear in (mlp.linear_fc1, mlp.linear_fc2)]

    def __call__(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> [S, B, H], and the bias of fc2, as Megatron's MLP, which computes what has
        more arguments."""
        asked = any(value is not None for value in (*args, *kwargs.values()))
        if asked or not all(one.adapter.is_on for _, one in self._linears):
            out: tuple[Tensor, Tensor | None] = self._inner(hidden_states, *args, **kwargs)
            return out
        first, _ = self._linears[0]
        gathers = first.collectives is LinearCollectives.COLUMN_SEQUENCE
        ranks = first.linear.tp_group.size() if gathers else 1
        tokens = hidden_states[..., 0].numel() * ranks
        dtype = first.implementation.compute_dtype or hidden_states.dtype
        fc1, fc2 = (_linear(tokens, *both, dtype) for both in self._linears)
        mlp = self._mlp
        how = AdaptedMlp(
            fc1=fc1, fc2=fc2, bias_N=mlp.linear_fc1.bias, activation=mlp.activation_func
        )
        out_SBH = adapted_mlp(hidden_states.to(dtype), how).to(hidden_states.dtype)
        return out_SBH, mlp.linear_fc2.bias


def _with_adapter(linear: nn.Module) -> tuple[LinearForward, LinearWithAdapter]:
    """Return a linear's own forward, and how cc-lora computes its adapter; without it, with each
    collective in one piece."""
    forward = own_forward(linear)
    adapted = forward.implementation.adapted
    if isinstance(adapted, LinearWithAdapter):
        return forward, adapted
    adapter = adapter_of(linear)
    assert adapter is not None
    return forward, LinearWithAdapter(adapter=adapter)


def _linear(
    tokens: int, forward: LinearForward, adapted: LinearWithAdapter, dtype: torch.dtype
) -> MlpLinear:
    """Return a linear and its adapter, computed in a dtype."""
    linear, adapter, how = forward.linear, adapted.adapter, forward.implementation
    weight = None if how.weight is not None else linear.weight
    await_parameters(linear)  # neither the linear nor its adapter is called
    return MlpLinear(
        make_weight_NK=partial(how.values_of, weight, dtype),
        a_RK=adapter.lora_A.to(dtype),
        parts=tuple(adapter.lora_B.values()),
        make_b_RN=partial(_outer_matrix, adapter, dtype),
        schedule=adapted.schedule(
            tokens, linear.weight.shape[1], forward.collectives, linear.tp_group, how
        ),
        dropped=adapter.dropped,
        dropout=adapter.dropout if adapter.training else 0.0,
    )


def _outer_matrix(adapter: LinearAdapter, dtype: torch.dtype, parts: Sequence[Tensor]) -> Tensor:
    return adapter.outer_matrix(dtype, dict(zip(adapter.lora_B, parts, strict=True)))
