"""What a run is expected to cost, and how a plugin changes it. No torch, nothing is allocated.

The kernel counts the plain model in these terms, then applies the plugins' changes in resolved
order, innermost first. It knows no feature: a change names what it touches by the parts of a layer
and the tensors in them, which are the names below.

Parts of a layer, and what each keeps for backward in the plain model:

    input_norm      input, statistics
    self_attention  input (of the projection in), projected (before heads are split, where kept),
                    q, k, v, out, lse, attended (the projection out's input, where it is not out),
                    copied (the same by a plugin's kernel),
                    dropped (with hidden dropout, in the feed-forward and the experts too); with
                    latent attention no projected but latents, and normed_latents
    mlp_norm        input, statistics
    mlp             input, hidden (first product), activated (non-linearity), product (second
                    product's input)
    router          input, scores
    dispatcher      indices, sent, received
    experts         input, hidden, activated, product, weighted
    shared_experts  as mlp

and beside the layers ``embedding``, ``final_norm`` and ``loss``. A tensor is ``part.name``;
patterns are those of fnmatch (``self_attention.*``, ``*.input``).

Why the plain model's linears send: ``attention``, ``feed-forward`` or ``shared experts``, then
``, forward``; ``, backward``; ``, backward: input`` (gathered again for the gradient of a weight);
``, backward: frozen`` (a gradient that no gradient of a weight hides).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs


class Moment(enum.StrEnum):
    """When working memory is held."""

    FORWARD = "forward"
    """While the forward of the part runs, once for each micro-batch."""
    LOSS = "loss"
    """While the loss is taken, on the last pipeline stage."""
    BACKWARD = "backward"
    """While the backward of the part runs."""
    UPDATE = "update"
    """While the optimizer steps; no activation is left by then."""


class Place(enum.StrEnum):
    """Where what is kept for backward waits for it."""

    DEVICE = "device"
    HOST = "host"
    NOWHERE = "nowhere"


@attrs.frozen(kw_only=True)
class _Named:
    part: str
    """Of a layer; ``embedding``, ``final_norm``, ``output_layer`` or ``loss`` beside them."""
    name: str

    @property
    def key(self) -> str:
        """``part.name``."""
        return f"{self.part}.{self.name}"


@attrs.frozen(kw_only=True)
class KeptTensor(_Named):
    """What one layer keeps of one micro-batch from forward to backward."""

    nbytes: float
    """Unit: bytes, on one rank."""


@attrs.frozen(kw_only=True)
class ParameterCost(_Named):
    """One parameter tensor as one rank holds it."""

    numel: int
    is_expert: bool = False
    """Reduced over the experts' own data-parallel group (``expt_dp``) rather than ``dp_cp``."""
    trained: bool = True
    is_matrix: bool = True
    """Multiplied with every token, and so counted in FLOPs; a norm, a bias, a table of embeddings
    is not."""
    layer: int | None = None
    """Index in the whole model; None beside the layers."""
    is_shared_embedding: bool = False
    """The first and the last pipeline stage hold copies, whose gradients are summed."""
    sees_own_tokens: bool = False
    """Whole on every tensor-parallel rank, which under sequence parallelism adds its own tokens
    to the gradient only, so that it is summed over them."""


@attrs.frozen(kw_only=True)
class WorkingMemory(_Named):
    """Bytes that are held for a moment only: what a collective or a kernel writes to. Where its
    part is ``part.step``, with one step of a backward."""

    nbytes: float
    moment: Moment


@attrs.frozen(kw_only=True)
class Messages:
    """Collectives or messages of one operation over one process group in one step."""

    operation: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast`` or
    ``send``."""
    group: str
    """Axis of the layout (``tp``, ``cp``, ``ep``, ``dp``, ``dp_cp``, ``expt_dp``, ``pp``,
    ``tp_ep``, ``mp``), or a group that the plugin adds."""
    calls: float
    """A step, by one rank."""
    sent_bytes: float
    """Of the tensors that one rank puts in, over all calls of a step."""
    why: str
    hidden: bool = False
    """Whether it travels beside the computation."""
    group_size: int = 0
    """Ranks of a group that is not an axis of the layout; 0: the axis says it."""
    group_stride: int = 1
    """From one rank of such a group to the next."""
    instead_of: str = ""
    """Of a plugin's: an operation. These stand in the place of the plain model's messages of that
    operation over the group, for each reason that ``why`` matches as a pattern, and ``calls`` and
    ``sent_bytes`` are factors of theirs; of several for one, all stand there."""


@attrs.frozen(kw_only=True)
class KeptChange:
    """What becomes of tensors that are kept for backward."""

    tensors: tuple[str, ...]
    """Patterns of ``part.name``."""
    layers: tuple[int, ...] | None = None
    """Indices in the whole model; None: all of this rank."""
    place: Place = Place.DEVICE
    """Where they wait; ``nowhere``: they are not kept."""
    factor: float = 1.0
    """Times as many bytes."""
    at_least: float = 0.0
    """Only tensors of at least so many bytes. Unit: bytes."""
    ahead: int = 0
    """On the host: how long before their own backward they come back, and what of the last layers
    never leaves. Unit: layers."""


@attrs.frozen(kw_only=True)
class Recomputation:
    """Parts whose forward runs again in backward: they keep their input only, and their forward
    FLOPs and messages come twice."""

    parts: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    """Indices in the whole model; None: all of this rank."""


@attrs.frozen(kw_only=True)
class CostChange:
    """What one plugin changes on one kind of rank; every field may stay empty."""

    kept: tuple[KeptChange, ...] = ()
    kept_added: tuple[KeptTensor, ...] = ()
    """In each of this rank's layers, or where ``kept_added_layers`` names some."""
    kept_added_layers: tuple[int, ...] | None = None
    recomputed: tuple[Recomputation, ...] = ()
    working: tuple[WorkingMemory, ...] = ()
    """In addition to what is there."""
    working_removed: tuple[str, ...] = ()
    """Patterns of ``part.name`` of working memory that is not held any more."""
    buffers: Mapping[str, float] = attrs.field(factory=dict)
    """Held for the length of the run: name -> bytes on the device."""
    host_buffers: Mapping[str, float] = attrs.field(factory=dict)
    """Name -> bytes on the host, beside the kept tensors that wait there."""
    host_is_device: bool = False
    """Of a platform: what waits on the host takes the same memory as what does not."""
    frozen: tuple[str, ...] = ()
    """Patterns of ``part.name`` of parameters that are not trained."""
    parameters: tuple[ParameterCost, ...] = ()
    messages: tuple[Messages, ...] = ()
    flops: float = 0.0
    """Added in one step on one rank; negative where less is computed. Recomputation, ``frozen`` and
    ``parameters`` count themselves."""


@attrs.frozen(kw_only=True)
class RankKind:
    """Ranks that all expect the same: those of one pipeline stage. What ``ascend_cost`` is asked
    about, with the plain model's numbers before any plugin's change."""

    pp_rank: int
    layers: tuple[int, ...]
    """Indices in the whole model of the layers that it holds; places left empty are not there."""
    moe_layers: frozenset[int]
    """Those of them that have experts."""
    is_first: bool
    """It holds the embedding."""
    is_last: bool
    """It holds the output layer and takes the loss."""
    tokens: int
    """Of one micro-batch on this rank, as the attention sees them: its part of the sequence times
    ``train.micro_batch_size``."""
    item_bytes: int
    """Of a number in an activation or a parameter. Unit: bytes."""
    num_micro_batches: int
    """In one step on one rank."""
    heads: int
    """Query heads of this tensor-parallel rank; so for the next."""
    query_groups: int
    head_width: float
    """Half of what a key and a value of one head have together, and a query and its output; all of
    these are so wide but with latent attention."""
    value_width: int
    """Of a value and of the output."""
    attention_needs: frozenset[str] = frozenset()
    """What the run asks of its attention kernel: names of the fields of ``AttentionFeatures``."""
    has_gradient_buffers: bool = True
    """Weight gradients are added up in buffers, in float32; else they are autograd's own."""
    kept: Mapping[int, tuple[KeptTensor, ...]] = attrs.field(factory=dict)
    """Layer -> what it keeps of one micro-batch."""
    parameters: tuple[ParameterCost, ...] = ()

    @property
    def layer_passes(self) -> int:
        """Forwards of a layer in one step."""
        return len(self.layers) * self.num_micro_batches
