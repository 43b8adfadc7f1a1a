"""Which linears of a layer have a bias. Torch-free.

Megatron has ``add_bias_linear`` for all of them and ``add_qkv_bias`` for queries, keys and values;
the other options override the former for one kind of linear each.
"""

from __future__ import annotations

import attrs

from ascend_run.types.config import FieldSection


@attrs.frozen
class LinearBiases:
    """Whether each kind of linear has a bias."""

    qkv: bool
    proj: bool  #: The attention's output projection.
    mlp: bool  #: Both linears of a dense MLP.
    router: bool
    experts: bool  #: Both linears of each expert.


def linear_biases(model: FieldSection) -> LinearBiases:
    """Return the biases of ``[model]``."""
    of_all = bool(model.add_bias_linear)

    def own(value: bool | None) -> bool:
        return of_all if value is None else value

    return LinearBiases(
        qkv=of_all or bool(model.add_qkv_bias),
        proj=own(model.add_linear_proj_bias),
        mlp=own(model.add_mlp_bias),
        router=own(model.add_router_bias),
        experts=own(model.add_expert_bias),
    )
