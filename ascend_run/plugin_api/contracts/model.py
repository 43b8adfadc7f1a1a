"""The model: operators, loss, and a family as data.

Shape letters: see the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import attrs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ascend_run.plugin_api.manifest import Condition

    from .attention import AttentionKernel
    from .moe import GroupedProducts

_Form = TypeVar("_Form", bound=Callable[..., Any])


@attrs.frozen(kw_only=True)
class PlatformOps:
    """Fused operators of a platform; every one differentiable, with a plain reference in tests."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """``(x, weight, eps)``; x any shape [..., H]."""
    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    """``(x, weight, bias, eps)``."""
    swiglu: Callable[[Tensor], Tensor]
    """[..., 2F] (gate, then up) -> [..., F]."""
    rotary: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    """``(x_SBND, cos_SR, sin_SR, interleaved)``: rotate the first R (the tables' width) of D."""
    split_qkv_rotary: (
        Callable[[Tensor, Tensor, Tensor, tuple[int, int, int], bool], tuple[Tensor, ...]] | None
    ) = None
    """``(mixed_SBM, cos_SR, sin_SR, (G, N/G, D), interleaved)``: the split of Megatron's
    [S, B, G * (N/G + 2) * D] into q [S, B, N, D] and k, v [S, B, G, D], and the rotation of q and
    k, at once; None where ``rotary`` after the split is as good."""
    grouped_matmul: Callable[[Sequence[int], torch.device], GroupedProducts] | None = None
    """Products of groups of rows, from the rows of each; None where those of
    ``ops.experts.grouped_matmul`` serve, in torch's own operations."""
    attention_kernels: Mapping[str, Callable[..., AttentionKernel]] = attrs.field(factory=dict)
    """Name -> builder of each attention kernel that the platform has, for a plugin to choose from;
    the first is what the platform answers to ``ascend_attention_kernel`` itself. Keywords are the
    kernel's own."""
    fused: Mapping[str, Callable[..., Any]] = attrs.field(factory=dict)
    """Further operators of which the platform has a form of its own, by the name of the torch form
    in ``ascend_run.ops``, whose arguments and answer each has. ``form`` reads it; the list of them
    all is docs/operators.md."""

    def form(self, reference: _Form) -> _Form:
        """The platform's form of an operator, or, where it has none, the torch form itself.

        Args:
            reference: The torch form, a function of ``ascend_run.ops``.
        """
        return cast("_Form", self.fused.get(reference.__name__, reference))


class LossKernel(Protocol):
    """Next-token cross-entropy as a sum; the mean is taken once, over all ranks and batches."""

    def from_hidden(
        self, hidden_SBH: Tensor, weight_VH: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor
    ) -> Tensor:
        """Sum of masked losses, a scalar, without holding all logits.

        Called where the output layer is a plain matrix product; with tensor parallelism the
        weight is this rank's rows and the sum is the whole one on every rank.
        """
        ...

    def from_logits(self, logits_SBV: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor) -> Tensor:
        """The same from (vocabulary-parallel) logits; called where a plugin wraps the output
        layer."""
        ...


@attrs.frozen(kw_only=True)
class ConfigKey:
    """One key of a Hugging Face ``config.json`` and the config value it stands for.

    Several keys may stand for one value; a config.json must then give them the same.
    """

    hf: str
    field: str
    """``model.num_layers``."""
    default: Any = attrs.field(factory=lambda: attrs.NOTHING)
    """What Hugging Face assumes where the key is missing; ``attrs.NOTHING``: it must be there."""
    nullable: bool = False
    """It may be null, whatever a missing one means."""
    form: str = "copy"
    """``copy``; of counts, ``dense_layers_first`` (``model.moe_layer_freq`` as the number of layers
    before the first with experts), ``expert_widths`` (the shared experts' width as a number of
    experts' widths)."""


@attrs.frozen(kw_only=True)
class TensorMap:
    """One parameter of ours and the Hugging Face tensors that hold the same numbers.

    Names hold ``{layer}`` and, in an expert's, ``{expert}``.
    """

    megatron: str
    hf: tuple[str, ...]
    form: str = "copy"
    """``copy``; ``qkv`` (q, k, v interleaved by key-value group; of three tensors, or of one that
    holds their rows one after the other); ``concat`` (rows one after the other, gate then up);
    ``stack_experts`` (each expert's, concatenated, stacked on axis 0)."""
    transposed: bool = False
    """The stored matrices are [in, out], as GPT-2's Conv1D has them; ours are [out, in]."""
    layers: str = "all"
    """Which have it: ``all``, ``dense`` or ``experts`` (those without and with experts)."""
    condition: Condition | None = None
    """Only a model of which this holds has it."""


@attrs.frozen(kw_only=True)
class ModelFamily:
    """A family of models as data that serves both directions of conversion."""

    model_type: str
    """Hugging Face's ``model_type``."""
    architecture: str
    """Hugging Face's class, for ``architectures`` on export."""
    defaults: Mapping[str, Any]
    """Config values that make Megatron's model this family's: ``model.normalization`` ..."""
    keys: tuple[ConfigKey, ...]
    tensors: tuple[TensorMap, ...]
    fixed: Mapping[str, Any] = attrs.field(factory=dict)
    """HF keys that must have this value, and are written with it."""
    ignored: frozenset[str] = frozenset()
    """HF keys that do not change the numbers; any key named nowhere is an error."""
    base_prefix: str = ""
    """What every stored name but the output layer's begins with. Where a family gives it, a folder
    that was saved without a head, whose names lack it, is read as well."""
    buffers: tuple[str, ...] = ()
    """Regular expressions over whole stored names: tensors that are no parameters, passed over."""
