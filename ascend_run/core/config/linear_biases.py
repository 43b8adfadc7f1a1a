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
    proj: bool
    """The attention's output projection."""
    mlp: bool
    """Both linears of a dense MLP."""
    router: bool
    experts: bool
    """Both linears of each expert."""


def linear_biases(model: FieldSection) -> LinearBiases:
    """Return the biases of ``[model]``."""
    of_all = bool(model.add_bias_linear)
    names = {"proj": "linear_proj", "mlp": "mlp", "router": "router", "experts": "expert"}
    given = {kind: model[f"add_{name}_bias"] for kind, name in names.items()}
    return LinearBiases(
        qkv=of_all or bool(model.add_qkv_bias),
        **{kind: of_all if value is None else value for kind, value in given.items()},
    )
