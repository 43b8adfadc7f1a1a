"""What layers keep with plugins that change it, or say that they do not: against what they save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest

from ascend_run.core.config.activation_policy import activation_policies
from ascend_run.core.hooks import Hooks
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.costs import planned
from tests.support.saved_tensors import expected_bytes, saved_bytes

_HALF: Final = {"train.precision": "bf16", "train.global_batch_size": 2}
_WHOLE: Final = {"train.global_batch_size": 2}
_WIDE_STREAM: Final = {"model.fp32_residual_connection": True}
_NONE_DROPPED: Final = {"model.moe_expert_capacity_factor": 9.0}
_GATHERED: Final = {"model.moe_token_dispatcher_type": "allgather"}
_PADDED: Final = {
    "model.moe_expert_capacity_factor": 1.0,
    "model.moe_pad_expert_input_to_capacity": True,
}
"""As many rows as the model without a capacity has."""
_SHARED: Final = {"model.moe_shared_expert_intermediate_size": 24}
_NO_POSITIONS: Final = {"model.position_embedding_type": "none"}

CASES: Final[Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]]] = {
    "plain": ((), {}),
    "plain with norms of heads": ((), {"model.qk_layernorm": True}),
    "plain with L2 norms of heads": ((), {"model.qk_l2_norm": True}),
    "a gate with an offset": (
        (),
        {"model.activation": "quick_gelu", "model.glu_linear_offset": 1.0},
    ),
    "QuickGELU without a gate": (
        (),
        {"model.activation": "quick_gelu", "model.gated_linear_unit": False},
    ),
    "a norm by its formula": (("rms-norm",), {"plugins.rms-norm.kernel": "torch"}),
    "a wide residual stream": ((), _WIDE_STREAM),
    "a wide residual stream normed by the formula": (
        ("rms-norm",),
        {"plugins.rms-norm.kernel": "torch", **_WIDE_STREAM},
    ),
    "norms of heads by their formula": (
        ("rms-norm",),
        {"plugins.rms-norm.kernel": "torch", "model.qk_layernorm": True},
    ),
    "a rotation by its formula": (("rotary",), {"plugins.rotary.kernel": "torch"}),
    "attention in blocks": (("flash-attention",), {"plugins.flash-attention.kernel": "blocks"}),
    "attention in blocks, no positions": (
        ("flash-attention",),
        {"plugins.flash-attention.kernel": "blocks", **_NO_POSITIONS},
    ),
    "by halves": ((), {"data.seq_length": 128}),
    "a long sequence in blocks": (
        ("flash-attention",),
        {"plugins.flash-attention.kernel": "blocks", "data.seq_length": 128},
    ),
    "a bias of positions": (("alibi",), _NO_POSITIONS),
    "a bias of positions, in blocks anyway": (
        ("alibi", "flash-attention"),
        {"plugins.flash-attention.kernel": "blocks", **_NO_POSITIONS},
    ),
    "dropout": ((), {"model.attention_dropout": 0.1, **_NO_POSITIONS}),
    "an empty place": (
        ("noop-layers",),
        {"model.num_layers": 3, "plugins.noop-layers.layers": [1]},
    ),
    "deterministic kernels": (("deterministic",), {}),
    "the second version of a kernel": (("fusion-attention-v2",), {}),
    "shared masks": (("generate-mask",), {"model.window_size": [4, 0]}),
    "gradients added in the product": (("matmul-add",), {}),
}
DISCARDING: Final[Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]]] = {
    "activations": (("recompute-activation",), {}),
    "an activation of a gate that is not fused": (
        ("recompute-activation",),
        {"model.activation": "gelu"},
    ),
    "activations without a gate": (
        ("recompute-activation",),
        {"model.activation": "gelu_tanh", "model.gated_linear_unit": False},
    ),
    "squared activations": (
        ("recompute-activation",),
        {"model.activation": "squared_relu", "model.gated_linear_unit": False},
    ),
    "bounded activations": (
        ("recompute-activation",),
        {"model.activation": "quick_gelu", "model.activation_func_clamp_value": 7.0},
    ),
    "activations of a gate with an offset": (
        ("recompute-activation",),
        {"model.activation": "quick_gelu", "model.glu_linear_offset": 1.0},
    ),
    "QuickGELU without a gate": (
        ("recompute-activation",),
        {"model.activation": "quick_gelu", "model.gated_linear_unit": False},
    ),
    "activations of the first layer": (
        ("recompute-activation",),
        {"plugins.recompute-activation.num_layers": 1},
    ),
    "norms": (("recompute-norm",), {}),
    "norms of a wide residual stream": (("recompute-norm",), _WIDE_STREAM),
    "norms by their formula": (
        ("recompute-norm", "rms-norm"),
        {"plugins.rms-norm.kernel": "torch"},
    ),
    "layer norms": (("recompute-norm",), {"model.normalization": "LayerNorm"}),
    "both": (("recompute-activation", "recompute-norm"), {}),
    "norms, and the attention offloaded": (
        ("recompute-norm", "swap-attention"),
        {"plugins.swap-attention.min_bytes": 1},
    ),
    "layers": (("recompute",), {}),
    "the first layer, and activations": (
        ("recompute", "recompute-activation"),
        {"plugins.recompute.num_layers": 1},
    ),
    "feed-forwards and norms": (
        ("recompute", "recompute-norm"),
        {"plugins.recompute.granularity": "selective"},
    ),
}
DISCARDING_EXPERTS: Final[Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]]] = {
    "shared experts": ((), _SHARED),
    "activations of shared experts": (("recompute-activation",), _SHARED),
    "squared activations of shared experts": (
        ("recompute-activation",),
        {**_SHARED, "model.activation": "squared_relu", "model.gated_linear_unit": False},
    ),
    "squared activations of a layer without experts, of which the first two count": (
        ("recompute-activation",),
        {
            "model.activation": "squared_relu",
            "model.gated_linear_unit": False,
            "model.num_layers": 4,
            "model.moe_layer_freq": [1, 0, 0, 1],
            "plugins.recompute-activation.num_layers": 2,
        },
    ),
    "norms before experts": (("recompute-norm",), {}),
    "norms before shared experts": (("recompute-norm",), _SHARED),
    "shared experts recomputed": (
        ("recompute",),
        {
            **_SHARED,
            "plugins.recompute.granularity": "selective",
            "plugins.recompute.modules": ["shared_experts"],
        },
    ),
}
EXPERTS: Final[Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]]] = {
    "shared experts": ((), _SHARED),
    "deterministic experts": (("deterministic",), {}),
    "a fused permutation of tokens": (("moe-permute-fusion",), {}),
    "experts that may drop": ((), _NONE_DROPPED),
    "a fused permutation of as many": (("moe-permute-fusion",), _NONE_DROPPED),
    "padded experts": ((), _PADDED),
    "padded experts of gathered tokens": ((), {**_PADDED, **_GATHERED}),
    "a fused permutation of padded experts": (("moe-permute-fusion",), _PADDED),
    "experts and attention in blocks": (
        ("flash-attention",),
        {"plugins.flash-attention.kernel": "blocks"},
    ),
}
"""Compared with the plain model: how much each expert keeps depends on the routing."""
NEEDED: Final = sorted({name for plugins, _ in CASES.values() for name in plugins})


@pytest.mark.exhaustive(by=lambda precision: ["bf16"] if precision is _HALF else [])
@pytest.mark.needs_plugins(*NEEDED)
@pytest.mark.parametrize("precision", [_HALF, _WHOLE], ids=["bf16", "fp32"])
def test_layers_save_what_is_expected(gloo_pool: GlooPool, precision: Mapping[str, Any]) -> None:
    runs = [(plugins, {**DENSE, **precision, **values}) for plugins, values in CASES.values()]

    experts = {**MOE, **precision}
    runs += [((), experts), *((names, {**experts, **more}) for names, more in EXPERTS.values())]

    (saved,) = gloo_pool.run(saved_bytes, 1, runs)

    def by_name(found: Sequence[float]) -> dict[str, float]:
        plain, *others = found[len(CASES) :]
        more = {name: other - plain for name, other in zip(EXPERTS, others, strict=True)}
        return {**dict(zip(CASES, found, strict=False)), **more}

    assert by_name(saved) == by_name(
        [expected_bytes(planned(values, plugins)[1][0]) for plugins, values in runs]
    )


@pytest.mark.exhaustive(by=lambda precision: ["bf16"] if precision is _HALF else [])
@pytest.mark.needs_plugins(
    "recompute", "recompute-activation", "recompute-norm", "rms-norm", "swap-attention"
)
@pytest.mark.parametrize("precision", [_HALF, _WHOLE], ids=["bf16", "fp32"])
def test_layers_save_less_where_plugins_recompute(
    gloo_pool: GlooPool, precision: Mapping[str, Any]
) -> None:
    """As measured at the end of each layer: what is discarded has no bytes then."""
    runs = [(plugins, {**DENSE, **precision, **values}) for plugins, values in DISCARDING.values()]
    experts = {**MOE, **precision}
    moe = [((), experts), *((p, {**experts, **more}) for p, more in DISCARDING_EXPERTS.values())]

    (found,) = gloo_pool.run(saved_bytes, 1, [*runs, *moe])

    expected = []
    for plugins, values in [*runs, *moe]:
        prepared, (cost,) = planned(values, plugins)
        policies = activation_policies(prepared.config, Hooks(prepared.instances()))
        expected.append(expected_bytes(cost, policies))
    dense = dict(zip(DISCARDING, zip(found, expected, strict=True), strict=False))
    assert {name: pair for name, pair in dense.items() if pair[0] != pair[1]} == {}
    (first, first_expected), *others = zip(found[len(runs) :], expected[len(runs) :], strict=True)
    more = {
        name: (measured - first, planned_bytes - first_expected)
        for name, (measured, planned_bytes) in zip(DISCARDING_EXPERTS, others, strict=True)
    }
    assert {name: pair for name, pair in more.items() if pair[0] != pair[1]} == {}
