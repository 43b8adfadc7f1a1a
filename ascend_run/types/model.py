"""The model: fused operators, and model families as data.

Shape letters: see ``ascend_run.plugin_api.contracts``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import attrs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .attention import AttentionKernel
    from .condition import Condition
    from .config import FieldSection
    from .moe import GroupedGemm

_Form = TypeVar("_Form", bound=Callable[..., Any])


@attrs.frozen(kw_only=True)
class PlatformOps:
    """Fused operators of a platform, all differentiable and tested against a plain reference."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """``(x, weight, eps)``; x any shape [..., H]."""
    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    """``(x, weight, bias, eps)``."""
    swiglu: Callable[[Tensor], Tensor]  #: [..., 2F] (gate, then up) -> [..., F].
    rotary: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    """``(x_SBND, cos_SR, sin_SR, interleaved)``: rotate the first R (width of the tables) of D."""
    split_qkv_rotary: (
        Callable[[Tensor, Tensor, Tensor, tuple[int, int, int], bool], tuple[Tensor, ...]] | None
    ) = None
    """``(mixed_SBM, cos_SR, sin_SR, (G, N/G, D), interleaved)``: split Megatron's
    [S, B, G * (N/G + 2) * D] into q [S, B, N, D] and k, v [S, B, G, D] and rotate q and k in one
    kernel; None if splitting and then calling ``rotary`` is as fast."""
    matmul: Callable[..., Tensor] | None = None
    """Matrix multiplication, with the arguments of ``torch.mm``; None for ``torch.mm``."""
    grouped_matmul: Callable[[Any, torch.device], GroupedGemm] | None = None
    """Grouped matmul, built from the number of rows of each group; None for
    ``ops.experts.grouped_matmul``, which is made of torch operations."""
    attention_kernels: Mapping[str, Callable[..., AttentionKernel]] = attrs.field(factory=dict)
    """Name -> builder of each attention kernel of the platform, for a plugin to choose from; the
    first is the platform's default, returned by its ``ascend_attention_kernel``. Keyword arguments
    are specific to the kernel."""
    fused: Mapping[str, Callable[..., Any]] = attrs.field(factory=dict)
    """Further operators that the platform implements: name of the reference implementation in
    ``ascend_run.ops`` -> a function with the same arguments and results. Read by ``form``; listed
    in docs/operators.md."""

    def form(self, reference: _Form) -> _Form:
        """Return the platform's implementation of an operator, or the reference if it has none.

        Args:
            reference: The implementation in torch operations, a function of ``ascend_run.ops``.
        """
        return cast("_Form", self.fused.get(reference.__name__, reference))


class WeightStorage(Protocol):
    """Another form in which the frozen weights of a model's linears are stored."""

    def pack(self, weight_NK: Tensor) -> Mapping[str, Tensor]:
        """Return what is stored in place of this rank's shard: name -> tensor."""

    def unpack(self, packed: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return the shard, in the shape and dtype of ``like``: in each forward and backward."""


@attrs.frozen(kw_only=True)
class KeyForm:
    """Conversion of a ``config.json`` key whose values have another form in ``[model]``."""

    name: str  #: Shown in the tables of docs/families: ``number_of_keys``.
    to_ours: Callable[[Any, Mapping[str, Any]], Any]
    """``(value, values)``: values of all keys without a form and of those before this one, by
    field. ``attrs.NOTHING`` leaves the family's default. ValueError: states what was expected."""
    to_theirs: Callable[[Any, FieldSection], Any]
    """``(value, model)``: ``[model]`` with what Megatron derives for None. ``attrs.NOTHING`` is the
    key's default. ValueError: states why the model has no such value."""
    least: int | None = 1  #: Of a count; None: ``to_ours`` checks its values itself.


@attrs.frozen(kw_only=True)
class ConfigKey:
    """One key of a Hugging Face ``config.json`` and the config value that it maps to.

    Several keys may map to one value, and one key to several; these must then agree.
    """

    hf: str  #: Name of the key; of one in an object: ``rotary.base``.
    field: str  #: ``model.num_layers``.
    default: Any = attrs.field(factory=lambda: attrs.NOTHING)
    """Hugging Face's default for a missing key; ``attrs.NOTHING`` if the key is required."""
    also: str = ""  #: Another name that some folders have for it; read, and not written.
    nullable: bool = False  #: Whether it may be null, independently of ``default``.
    form: KeyForm | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.instance_of(KeyForm))
    )  #: Conversion of the value; None: it is copied.


@attrs.frozen(kw_only=True)
class TensorMap:
    """One Megatron parameter and the Hugging Face tensors that it converts to and from.

    Names contain ``{layer}`` and, for an expert's tensors, ``{expert}``.
    """

    megatron: str  #: Megatron's name: ``decoder.layers.{layer}...``.
    hf: tuple[str, ...]  #: Stored names, in the order of ``form``.
    form: str = "copy"
    """``copy``; ``qkv`` (q, k, v interleaved by key-value group; from three tensors, or from one
    with their rows concatenated); ``concat`` (concatenated along rows, gate then up);
    ``stack_experts`` (each expert's concatenated, then stacked on axis 0); ``stacked`` (one tensor
    that stacks all experts, as ours); ``stacked_interleaved`` (the same, whose rows are gate, up,
    gate, up ...)."""
    transposed: bool = False
    """The stored matrices are [in, out], like GPT-2's Conv1D; Megatron's are [out, in]."""
    layers: str = "all"
    """Layers that have it: ``all``, ``dense`` or ``experts`` (without or with experts)."""
    condition: Condition | None = None
    """The tensor exists only in models whose config meets this condition."""


@attrs.frozen(kw_only=True)
class ModelFamily:
    """A model family as data, for conversion in both directions."""

    model_type: str  #: Hugging Face's ``model_type``.
    architecture: str  #: Hugging Face's class, for ``architectures`` on export.
    defaults: Mapping[str, object]
    """Config values that configure Megatron's model for this family: ``model.normalization`` ..."""
    keys: tuple[ConfigKey, ...]  #: All keys that set a value.
    tensors: tuple[TensorMap, ...]  #: Every parameter, in any order.
    former_architectures: tuple[str, ...] = ()  #: Other names of the class in ``architectures``.
    fixed: Mapping[str, object] = attrs.field(factory=dict)
    """HF keys that must have this value on import, and are written with it on export; of a tuple of
    equivalent values, the first is written."""
    ignored: frozenset[str] = frozenset()
    """HF keys that do not affect the model's output; any other unlisted key is an error."""
    rope_parameters: frozenset[str] = frozenset()
    """Parameters of RoPE scaling that this class reads and few others do: ``short_mscale`` ..."""
    base_prefix: str = ""
    """Prefix of every stored name except the output layer's. If given, folders that were saved
    without a head, whose names lack it, can be read too."""
    buffers: tuple[str, ...] = ()
    """Regular expressions of full stored names of tensors that are not parameters: skipped."""

    @property
    def classifier(self) -> str:
        """Hugging Face's class with a score head: ``LlamaForSequenceClassification``."""
        base = re.sub("ForCausalLM$|LMHeadModel$", "", self.architecture)
        return f"{base}ForSequenceClassification"
