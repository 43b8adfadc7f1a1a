"""The types that cross a hook. Torch appears in annotations only.

Shape letters, here and in every plugin:
    S sequence on this rank, T packed tokens, B micro-batch, N query heads, G key-value heads,
    D head width of q and k, E head width of v, H hidden size, F expert width, X experts here,
    V vocabulary on this rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import attrs

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .layout import Layout

T = TypeVar("T")
Wrapper = Callable[[T], T]
"""What a wrapper hook answers: from the inner thing to the outer one."""


# -- attention --------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Mask:
    """Which keys a query may see, as data; nobody holds a dense matrix unless a kernel must.

    A query at position ``query_start + i`` sees a key at ``key_start + j`` where every set rule
    allows it.
    """

    causal: bool = True
    window: tuple[int, int] | None = None
    """Keys seen to the left and to the right of a query's own position; -1 is unbounded."""
    document_ends: tuple[int, ...] | None = None
    """Positions at which documents end; a query sees only keys of its own document."""
    query_start: int = 0
    key_start: int = 0


@attrs.frozen(kw_only=True)
class Dropout:
    """Dropout on the attention probabilities, replayable in backward."""

    probability: float
    seed: int
    """Seed of the generator that draws the mask; the same in forward and backward."""


@attrs.frozen(kw_only=True)
class AttentionSpec:
    """What one call of an attention kernel has to compute, beside its tensors."""

    scale: float
    """Factor on ``q @ k.T`` before the softmax."""
    mask: Mask = attrs.field(factory=Mask)
    bias: Tensor | None = None
    """Added to the scaled scores; broadcasts to [B, N, S_q, S_k]."""
    sinks: Tensor | None = None
    """One extra logit a head, [N], that takes probability and gives no value."""
    softcap: float | None = None
    """``softcap * tanh(score / softcap)`` in place of the score."""
    dropout: Dropout | None = None


class AttentionResult(NamedTuple):
    """What a kernel's forward answers."""

    out: Tensor
    """[S_q, B, N, E], or [T_q, N, E] packed; the dtype of q."""
    lse: Tensor
    """Log of the sum of exponentials of the scaled scores, [B, N, S_q] or [N, T_q]; float32, or
    float64 for float64 inputs."""
    saved: tuple[Tensor, ...] = ()
    """Whatever else this kernel's backward reads."""


@attrs.frozen(kw_only=True)
class AttentionFeatures:
    """What a kernel can do; what is not declared is refused before anything runs."""

    window: bool = False
    documents: bool = False
    bias: bool = False
    sinks: bool = False
    softcap: bool = False
    dropout: bool = False
    packed: bool = False
    unequal_lengths: bool = False
    unequal_widths: bool = False


class AttentionKernel(Protocol):
    """Scaled dot-product attention with its log-sum-exp; the contract every feature composes.

    Wrapping kernels (Ulysses, ring) satisfy it too: on the outside they take this rank's part of
    the sequence, on the inside they call another kernel.
    """

    features: AttentionFeatures
    backward_reads: frozenset[str]
    """Which of ``q k v out lse`` backward reads; the others are not kept, and arrive as None."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        """Attend.

        Args:
            q: [S_q, B, N, D], or packed [T_q, N, D]; any strides.
            k: [S_k, B, G, D] or [T_k, G, D]; G divides N.
            v: [S_k, B, G, E] or [T_k, G, E].
        """
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: tuple[Tensor, ...],
        spec: AttentionSpec,
    ) -> tuple[Tensor, ...]:
        """Gradients ``(dq, dk, dv)``, in the shapes of q, k and v, then those of bias and sinks
        where the spec has them."""
        ...


class SequencePartition(Protocol):
    """How the context-parallel ranks share one sequence; owned with ``sequence-exchange``."""

    multiple: int
    """The sequence must be a multiple of ``multiple * cp``."""

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        """Half-open position ranges that one rank holds, in the order in which it holds them."""
        ...


# -- mixture of experts -----------------------------------------------------------------------


class ExpertWeights(NamedTuple):
    """The gated feed-forward weights of the experts on this rank."""

    fc1: Tensor
    """[X, 2F, H]: gate rows, then up rows; [X, F, H] where the activation is not gated."""
    fc2: Tensor
    """[X, H, F]."""


class ExpertsKernel(Protocol):
    """The feed-forward of every local expert on the tokens sent to it."""

    def __call__(
        self,
        tokens_TH: Tensor,
        tokens_per_expert: Sequence[int],
        probs_T: Tensor,
        weights: ExpertWeights,
        activation: ExpertActivation,
    ) -> Tensor:
        """``probs * (act(x @ fc1.T) @ fc2.T)`` for each token with its own expert.

        Args:
            tokens_TH: Sorted by expert: the first ``tokens_per_expert[0]`` are the first one's.
            tokens_per_expert: X counts, on the host; their sum is T; any may be 0, and then that
                expert's weights still receive a gradient of zeros.
            probs_T: Weight of each token in its expert's output; applied before fc2, as
                Megatron does.

        Returns:
            [T, H], differentiable in tokens, probs and weights.
        """
        ...


@attrs.frozen(kw_only=True)
class ExpertActivation:
    """The experts' non-linearity: ``function(gate) * up`` where gated, else ``function(x)``."""

    function: Callable[[Tensor], Tensor]
    gated: bool = True
    is_silu: bool = True
    """Whether it is SiLU, so that a fused SwiGLU may stand in for it."""


# -- model ------------------------------------------------------------------------------------


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


@attrs.define
class ModelBundle:
    """One model of a run, in its role (``policy``, ``reference``, ...)."""

    role: str
    chunks: list[nn.Module]
    """Megatron's virtual pipeline chunks, wrapped for data parallelism where it trains."""
    transformer_config: Any
    """The megatron TransformerConfig it was built with."""
    optimizer: Any = None
    scheduler: Any = None

    @property
    def trains(self) -> bool:
        """Whether an optimizer moves its weights."""
        return self.optimizer is not None


@attrs.define
class RunContext:
    """A run under way: what events and tasks are given."""

    config: Any
    """The RunConfig."""
    layout: Layout
    device: Device
    groups: Any
    """Megatron's ProcessGroupCollection."""
    models: dict[str, ModelBundle] = attrs.field(factory=dict)
    """Role -> model; nothing assumes that there is one."""
    step: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0


# -- data, task and family --------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class BatchField:
    """How one named tensor of a batch is laid out and cut."""

    axes: tuple[str, ...]
    """Name of each axis: ``batch``, ``sequence``, or the plugin's own."""
    replicated: bool = False
    """Every context-parallel rank keeps it whole, though it has a ``sequence`` axis."""


@attrs.frozen(kw_only=True)
class Batch:
    """A micro-batch: named tensors with declared axes."""

    tensors: Mapping[str, Tensor]
    fields: Mapping[str, BatchField]


@attrs.frozen
class LossSum:
    """A loss that is not yet a mean."""

    sum: Tensor
    """Scalar, differentiable."""
    count: Tensor
    """Scalar, integer: tokens (or samples) that the sum runs over on this rank."""


class Task(Protocol):
    """What is trained: models, data, forward step and metrics."""

    roles: Sequence[str]
    """Models it needs; the first one trains."""
    batch_fields: Mapping[str, BatchField]

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """What to train and evaluate on: a ``TokenBlend``, which core builds, or a map-style
        dataset of the task's own with at least so many items, each a mapping from the names of
        ``batch_fields`` to tensors without the batch axis."""
        ...

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """One forward; the hidden state on every pipeline stage but the last, there the loss."""
        ...


@attrs.frozen(kw_only=True)
class TokenBlend:
    """Token files, each joined to one stream and cut to sequences of ``data.seq_length``.

    An item has ``tokens``, ``labels`` (the token after each), ``position_ids`` (int64) and
    ``loss_mask`` (float32), all [sequence].
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] = ()
    """Share of the samples that each gives; empty means in proportion to their tokens."""


class Datasets(NamedTuple):
    """What a task trains and evaluates on."""

    train: TokenBlend | Any
    validation: TokenBlend | Any | None


@attrs.frozen(kw_only=True)
class ConfigKey:
    """One key of a Hugging Face ``config.json`` and the config value it stands for."""

    hf: str
    field: str
    """``model.num_layers``."""
    default: Any = attrs.field(factory=lambda: attrs.NOTHING)
    """What Hugging Face assumes where the key is missing; ``attrs.NOTHING``: it must be there."""


@attrs.frozen(kw_only=True)
class TensorMap:
    """One parameter of ours and the Hugging Face tensors that hold the same numbers.

    Names hold ``{layer}`` and, in an expert's, ``{expert}``.
    """

    megatron: str
    hf: tuple[str, ...]
    form: str = "copy"
    """``copy``; ``qkv`` (q, k, v interleaved by key-value group); ``concat`` (rows one after the
    other, gate then up); ``stack_experts`` (each expert's, concatenated, stacked on axis 0)."""


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


# -- device, comm, checkpoint -----------------------------------------------------------------


class Device(Protocol):
    """One rank's accelerator, or the CPU standing in for it."""

    name: str
    backend: str
    """torch.distributed's: ``gloo``, ``nccl``, ``hccl``."""
    torch_device: torch.device

    def activate(self) -> None:
        """Make this rank's device current; called once, before any process group exists."""
        ...

    def deactivate(self) -> None:
        """Put back whatever ``activate`` changed in this process."""
        ...

    def synchronize(self) -> None:
        """Wait for everything queued."""
        ...

    def memory_bytes(self) -> tuple[int, int]:
        """(now, peak since the last reset)."""
        ...

    def reset_peak_memory(self) -> None: ...

    def host_copier(self) -> HostCopier:
        """A channel for copies between device and host beside the computation."""
        ...


class HostCopier(Protocol):
    """Copies to the host and back that overlap with computation where the device can."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start copying; the answer may be read after ``wait_host``."""
        ...

    def wait_host(self) -> None:
        """Make the computation wait until every started ``to_host`` has landed, after which the
        sources may be overwritten or freed."""
        ...

    def to_device(self, host: Tensor, out: Tensor) -> None:
        """Start copying back into ``out``."""
        ...

    def wait_device(self) -> None:
        """Make the computation wait until every started ``to_device`` has landed."""
        ...


@attrs.frozen(kw_only=True)
class Patch:
    """Somebody else's function replaced for the length of a run; the last resort."""

    target: str
    """``package.module:attribute.path``."""
    replacement: Any
    why: str
    versions: str
    """Versions of the target's distribution that it was checked against (PEP 440)."""
    source_hash: str | None
    """First 16 hex digits of SHA-256 of the target's source; None for what has no source."""
    until: str
    """What must happen upstream for this patch to go."""


class CheckpointEntry(Protocol):
    """Something that is saved and restored with a run, as tensors and JSON values."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@attrs.frozen(kw_only=True)
class ShardPiece:
    """The part of one global tensor that this rank holds and writes."""

    key: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    writes: bool = True
    """Exactly one of the ranks that hold the same part writes it."""


class CheckpointStore(Protocol):
    """Where checkpoints live. Every method is called on all ranks."""

    def steps(self) -> Sequence[int]:
        """Published checkpoints, oldest first."""
        ...

    def save(self, step: int, pieces: Sequence[ShardPiece], values: Mapping[str, Any]) -> str:
        """Write beside, verify, publish; the path of the published checkpoint.

        Args:
            values: JSON values, the same on every rank.
        """
        ...

    def verify(self, step: int) -> None:
        """Raise CheckpointError, naming file and tensor, where a checkpoint is not sound."""
        ...

    def layout(self, step: int) -> Mapping[str, int]:
        """Sizes of the parallel axes of the run that wrote a checkpoint, and ``world_size``."""
        ...

    def load(
        self, step: int, pieces: Sequence[ShardPiece], *, ignore_unused: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Fill the pieces' tensors in place, whatever layout wrote them; the JSON values.

        Args:
            ignore_unused: Patterns (``rng/*``) of keys that may be left unread; any other key that
                no rank asks for is an error.
        """
        ...


class Metrics(Protocol):
    """Readings of a step that a plugin adds to the log, called once a logged step."""

    def __call__(self, context: RunContext) -> Mapping[str, float]: ...


@attrs.frozen(kw_only=True)
class ReportPanel:
    """A plugin's own curve in ``report.html``."""

    title: str
    metrics: tuple[str, ...]
    """Names in the metrics log."""
    unit: str = ""


BatchIterator = Iterator[Batch]
