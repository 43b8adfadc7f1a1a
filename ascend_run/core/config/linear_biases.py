"""Which linears of a layer have a bias. Torch-free.

Megatron has ``add_bias_linear`` for all of them and ``add_qkv_bias`` for queries, keys and values;
two more options override the former for the attention's output projection and for the MLP.
"""

from __future__ import annotations

import attrs

from ascend_run.types.config import FieldSection


@attrs.frozen
class LinearBiases:
    """Whether each kind of linear has a bias."""

    qkv: bool
    proj: bool
    """The attention's output projection."""
    mlp: bool
    """Both linears of a dense MLP and of shared experts."""


def linear_biases(model: FieldSection) -> LinearBiases:
    """Return the biases of ``[model]``."""
    of_all = bool(model.add_bias_linear)
    return LinearBiases(
        qkv=of_all or bool(model.add_qkv_bias),
        proj=of_all if model.add_linear_proj_bias is None else model.add_linear_proj_bias,
        mlp=of_all if model.add_mlp_bias is None else model.add_mlp_bias,
    )
