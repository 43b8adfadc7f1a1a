"""Estimated memory, communication and FLOPs of a run, and how a plugin changes them. No torch;
nothing is allocated.

The kernel estimates the plain model, then applies the plugins' changes in resolved order, innermost
first. It knows no feature by name: a change refers to the parts of a layer and their tensors by the
names below.

Parts of a layer, and what each saves for backward in the plain model:

    input_norm      input, statistics
    self_attention  input (of the QKV projection), projected (before heads are split, if saved),
                    q, k, v, out, lse, attended (input of the output projection, if it is not out),
                    copied (the same, saved by a plugin's kernel),
                    dropped (with hidden dropout; also in the MLP and the experts); with latent
                    attention latents and normed_latents instead of projected
    self_attn_bda   input, statistics, of a norm of the output (``model.norm_placement``)
    mlp_norm        input, statistics
    mlp             input, hidden (output of fc1), activated (output of the activation), product
                    (input of fc2)
    mlp_bda         as self_attn_bda
    router          input, scores
    dispatcher      indices, sent, received
    experts         input, hidden, activated, product, weighted
    shared_experts  as mlp

and outside the layers ``embedding``, ``final_norm`` and ``loss``; what a plugin adds to
``recomputation`` is saved in layers that are recomputed whole. A tensor is ``part.name``; patterns
are fnmatch's (``self_attention.*``, ``*.input``).

``why`` of the plain model's communication in linears: ``attention``, ``feed-forward`` or
``shared experts``, then ``, forward`` (``, forward, again``: its repetitions only); ``, backward``;
``, backward: input`` (gathered again for a weight gradient); ``, backward: frozen`` (exposed).
A plugin's of ``<part>, forward`` is repeated where the part is recomputed (``model.recompute_*``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs


class Phase(enum.StrEnum):
    """When working memory is allocated."""

    FORWARD = "forward"  #: During the forward of the part, once per micro-batch.
    LOSS = "loss"  #: While the loss is computed, on the last pipeline stage.
    BACKWARD = "backward"  #: During the backward of the part.
    UPDATE = "update"  #: During the optimizer step; all activations are freed by then.


class Storage(enum.StrEnum):
    """Where activations are stored until backward, or optimizer states between steps."""

    DEVICE = "device"  #: On the device.
    HOST = "host"  #: Offloaded to the host: copied there and back, in time that ``plan`` counts.
    FILE = "file"  #: Offloaded to a file: written and read, in time that ``plan`` counts.
    NONE = "none"  #: Not saved.


@attrs.frozen(kw_only=True)
class _Named:
    part: str
    """Part of a layer; outside layers ``embedding``, ``final_norm``, ``output_layer``, ``loss``."""
    name: str

    @property
    def key(self) -> str:
        """``part.name``."""
        return f"{self.part}.{self.name}"


@attrs.frozen(kw_only=True)
class SavedTensor(_Named):
    """An activation that one layer saves for backward, for one micro-batch."""

    nbytes: float  #: Unit: bytes, on one rank.


@attrs.frozen(kw_only=True)
class ParameterCost(_Named):
    """One rank's shard of one parameter."""

    numel: int  #: Elements on this rank.
    is_expert: bool = False
    """Gradients are reduced over the experts' data-parallel group (``expt_dp``), not ``dp_cp``."""
    trained: bool = True  #: Whether it has a gradient.
    nbytes: float | None = None  #: If stored in another form; None: in the run's dtype.
    is_matrix: bool = True
    """Used in a matmul with every token, so counted in FLOPs; False for norms, biases, tables."""
    layer: int | None = None  #: Index in the whole model; None outside the layers.
    is_shared_embedding: bool = False
    """Replicated on the first and the last pipeline stage, which all-reduce its gradient."""
    sees_own_tokens: bool = False
    """Replicated over tensor-parallel ranks. Under sequence parallelism each rank's gradient covers
    its own tokens only, so it is all-reduced over them."""


@attrs.frozen(kw_only=True)
class WorkingMemory(_Named):
    """A temporary buffer, such as the output of a collective or of a kernel. ``part`` may name one
    step of a backward, as ``part.step``."""

    nbytes: float  #: Unit: bytes, on one rank.
    phase: Phase  #: When it is allocated.


@attrs.frozen(kw_only=True)
class Communication:
    """Collectives or sends of one operation over one process group in one step."""

    operation: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``reduce``
    or ``send``."""
    group: str
    """Axis of the layout (``tp``, ``cp``, ``ep``, ``dp``, ``dp_cp``, ``expt_dp``, ``pp``,
    ``tp_ep``, ``mp``), or a group that the plugin adds."""
    calls: float  #: Calls per step and rank.
    sent_bytes: float  #: Size of one rank's input tensors, over all calls of a step.
    why: str  #: What it is for; see above.
    largest_bytes: float = 0.0  #: ``sent_bytes`` of the largest call; 0: all calls send the same.
    overlapped: bool = False  #: Whether it is overlapped with computation; otherwise it is exposed.
    group_size: int = 0  #: Ranks of a group that is not an axis of the layout; 0 for an axis.
    group_stride: int = 1  #: Distance between neighbouring ranks of such a group.
    replaces: str = ""
    """For a plugin's communication: the operation that it replaces. All communication of that
    operation over the group whose ``why`` matches this ``why`` as a pattern is removed, and
    ``calls`` and ``sent_bytes`` are factors of the removed ones; several replacements add up."""


@attrs.frozen(kw_only=True)
class SavedChange:
    """A change to activations saved for backward; equal ones of several plugins are one."""

    tensors: tuple[str, ...]  #: Patterns of ``part.name``.
    layers: tuple[int, ...] | None = None  #: Indices in the whole model; None: all of this rank.
    storage: Storage = Storage.DEVICE  #: Where they are stored; ``none``: they are not saved.
    factor: float = 1.0  #: Factor on their size.
    at_least: float = 0.0  #: Only tensors of at least this size. Unit: bytes.
    kept: float = 0.0  #: Of tensors that are recomputed: the share of their bytes that is not.
    ahead: int = 0
    """Offloaded: how many layers before their own backward they are prefetched, and of the last
    layers are never offloaded; -1: fetched with the backward of their part. Unit: layers."""


@attrs.frozen(kw_only=True)
class RecomputedAhead:
    """Layers of a chunk that are recomputed at once, before its backward."""

    num_layers: int | None = None
    """The last ones of those that are recomputed whole; None: all."""
    kept_forwards: int = 0  #: Forwards in flight on a rank that are not recomputed.
    repeated: tuple[float, ...] = ()
    """Share of each chunk's forwards that are recomputed; empty: all."""


@attrs.frozen(kw_only=True)
class CostChange:
    """What one plugin changes on the ranks of one pipeline stage; every field is optional."""

    saved: tuple[SavedChange, ...] = ()  #: Changes to saved activations.
    saved_added: tuple[SavedTensor, ...] = ()
    """Saved in each of this rank's layers, or in those of ``saved_added_layers``."""
    saved_added_layers: tuple[int, ...] | None = None  #: Indices in the whole model; None: all.
    recomputed_ahead: RecomputedAhead | None = None  #: None: in backward, one by one.
    working: tuple[WorkingMemory, ...] = ()  #: Additional working memory.
    working_removed: tuple[str, ...] = ()
    """Patterns of ``part.name`` of working memory that is no longer allocated."""
    buffers: Mapping[str, float] = attrs.field(factory=dict)
    """Allocated for the whole run: name -> bytes on the device."""
    host_buffers: Mapping[str, float] = attrs.field(factory=dict)
    """Name -> bytes on the host, apart from offloaded activations."""
    host_is_device: bool = False  #: For a platform: both are one memory, so offloading saves none.
    main_param_bytes: float | None = None  #: Of a master weight between steps; None: not changed.
    optimizer_storage: Storage | None = None  #: Of its states between steps; None: not changed.
    optimizer_bytes: float | None = None  #: Most of its states there; None: all, and masters.
    optimizer_elements: float = 0.0  #: Of which they are on the device at once if stored elsewhere.
    frozen: tuple[str, ...] = ()  #: Patterns of ``part.name`` of parameters that are not trained.
    stored: Mapping[tuple[int, str], float] = attrs.field(factory=dict)
    """(Layer, ``part.name``) of a frozen parameter -> bytes of the form in which it is stored."""
    parameters: tuple[ParameterCost, ...] = ()  #: Added parameters.
    communication: tuple[Communication, ...] = ()  #: Added or replaced.
    note: str = ""  #: What ``plan`` shows beside the estimate, such as why nothing is saved.
    flops: float = 0.0
    """FLOPs added per step and rank; negative if fewer. Those of ``frozen``, ``parameters`` and
    ``ascend_activation_policy`` are derived and must not be included."""


@attrs.frozen(kw_only=True)
class PipelineStage:
    """The ranks of one pipeline stage, which all have the same estimate: the argument of
    ``ascend_cost``, with the plain model's numbers before any plugin's change."""

    pp_rank: int  #: Its index, from 0.
    layers: tuple[int, ...]
    """Indices in the whole model of its layers; empty layer slots are not included."""
    moe_layers: frozenset[int]  #: Those of them that have experts.
    is_first: bool  #: It holds the embedding.
    is_last: bool  #: It holds the output layer and computes the loss.
    tokens: int
    """Tokens of one micro-batch on this rank, as attention sees them: this rank's sequence length
    times ``train.micro_batch_size``."""
    item_bytes: int  #: Size of an element of an activation or a parameter. Unit: bytes.
    num_microbatches: int  #: Micro-batches per step and rank.
    heads: int  #: Query heads on this tensor-parallel rank.
    query_groups: int  #: Key-value heads on this tensor-parallel rank.
    head_width: float
    """Mean width of a key and a value of one head, which is also that of a query and an output. All
    four are equal except with latent attention."""
    value_width: int  #: Width of a value and of the output of one head.
    attention_needs: frozenset[str] = frozenset()
    """Names of the ``AttentionFeatures`` that the run needs."""
    has_gradient_buffers: bool = True
    """Weight gradients are accumulated in float32 buffers; otherwise in autograd's ``grad``."""
    saved: Mapping[int, tuple[SavedTensor, ...]] = attrs.field(factory=dict)
    """Layer -> activations that it saves for one micro-batch."""
    parameters: tuple[ParameterCost, ...] = ()  #: One rank's shards.
    forward_flops: float = 0.0  #: Of a step's forwards; on the last stage with the output layer's.

    @property
    def layer_passes(self) -> int:
        """Layer forwards per step and rank."""
        return len(self.layers) * self.num_microbatches
