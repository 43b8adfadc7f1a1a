"""The frozen, resolved configuration of a run, passed to every plugin.

``[model]`` and ``[parallel]`` hold every field of the installed Megatron's TransformerConfig under
Megatron's own name: ``[parallel]`` those inherited from ModelParallelConfig (parallel sizes and
communication), ``[model]`` the others. The fields are read from Megatron's source, so that neither
this module nor a plugin needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

DEFAULT_PLATFORM: Final = "cpu"
DEFAULT_TASK: Final = "pretrain"
DEFAULT_FAMILY: Final = "llama"
"""Default plugins of a run; the only ones that the kernel refers to by name."""

_positive: Any = attrs.validators.gt(0)
_not_negative: Any = attrs.validators.ge(0)
_fraction: Any = attrs.validators.and_(_not_negative, attrs.validators.lt(1))


class FrozenMapping(Mapping[str, Any]):
    """An immutable mapping; lists in it become tuples, dicts become FrozenMappings."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        self._values = {name: _frozen(value) for name, value in dict(values).items()}

    def __getstate__(self) -> dict[str, object]:
        return self._values

    def __setstate__(self, state: dict[str, object]) -> None:
        self._values = state

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"


def _frozen(value: object) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return FrozenMapping(value) if isinstance(value, dict) else value


class FieldSection(FrozenMapping):
    """The Megatron fields of one section, read as attributes: ``config.model.num_layers``.

    Raises:
        AttributeError: The installed Megatron has no such field.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look these up before _values exists
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}") from None


@attrs.frozen(kw_only=True)
class RunSection:
    """``[run]``: output folder, seed and ranks."""

    output_dir: str = "runs/default"
    """Folder for the resolved config, plan, metrics, log, checkpoints and report."""
    seed: int = attrs.field(default=1234, validator=_not_negative)
    """Of weights, order of the data and dropout."""
    nproc: int = attrs.field(default=1, validator=_positive)
    """Ranks to start on this machine, unless another launcher has started them."""
    timeout_seconds: int = attrs.field(default=600, validator=_positive)
    """Timeout of collectives. Unit: seconds."""


@attrs.frozen(kw_only=True)
class DataSection:
    """``[data]``: token files (``.bin`` and ``.idx``, given by their common prefix)."""

    train: tuple[str, ...] = ()  #: Prefixes of the training datasets.
    train_weights: tuple[float, ...] = ()
    """Share of each training dataset; default: in proportion to their tokens."""
    validation: tuple[str, ...] = ()  #: Prefixes of the validation datasets.
    validation_weights: tuple[float, ...] = ()  #: As ``train_weights``.
    tokenizer: str | None = None
    """Path of the ``tokenizer.json`` that the datasets were tokenized with."""
    seq_length: int = attrs.field(default=1024, validator=_positive)  #: Unit: tokens.
    eod_mask_loss: bool = False  #: Mask the end-of-document token in the loss.
    cache_dir: str | None = None
    """Folder of the sample indices; default: ``<output_dir>/index-cache``."""


@attrs.frozen(kw_only=True)
class TrainSection:
    """``[train]``: steps, batches, precision."""

    train_iters: int = attrs.field(default=100, validator=_not_negative)  #: Unit: optimizer steps.
    micro_batch_size: int = attrs.field(default=1, validator=_positive)
    """Unit: sequences per data-parallel rank and forward."""
    global_batch_size: int = attrs.field(default=1, validator=_positive)
    """Unit: sequences per optimizer step, over all ranks."""
    precision: str = attrs.field(
        default="bf16", validator=attrs.validators.in_(("bf16", "fp16", "fp32"))
    )  #: Dtype of weights and activations in forward and backward.
    loss_chunk_bytes: int | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(_positive),
        metadata={"page": "docs/loss.md"},
    )
    """Logits held by the loss at a time; default: 64 MiB on the CPU, else 256 MiB. Unit: bytes."""
    eval_interval: int = attrs.field(default=0, validator=_not_negative)
    """Steps between evaluations; 0: no evaluation. Unit: steps."""
    eval_iters: int = attrs.field(default=10, validator=_positive)
    """Unit: global batches of validation data per evaluation."""
    log_interval: int = attrs.field(default=1, validator=_positive)  #: Unit: steps.


@attrs.frozen(kw_only=True)
class DdpSection:
    """``[ddp]``: gradient reduction and sharding of the optimizer state; the names are those of
    Megatron's DistributedDataParallelConfig."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the data-parallel ranks: each rank updates its shard of the
    parameters, which are then all-gathered."""
    overlap_grad_reduce: bool = False
    """Overlap the gradient reduction of each bucket with the backward."""
    overlap_param_gather: bool = False
    """Overlap the parameter all-gather of each bucket with the next forward."""
    bucket_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_positive)
    )
    """Bucket size with overlap; default: 40 million, or one million per data-parallel rank if that
    is more. Unit: parameters."""


@attrs.frozen(kw_only=True)
class OptimizerSection:
    """``[optimizer]``: AdamW, arXiv:1711.05101; the names are Megatron's."""

    lr: float = attrs.field(default=3e-4, validator=_not_negative)
    """Highest learning rate, after the warm-up."""
    min_lr: float = attrs.field(default=0.0, validator=_not_negative)
    """Learning rate after the decay."""
    lr_decay_style: str = attrs.field(
        default="cosine", validator=attrs.validators.in_(("constant", "linear", "cosine", "WSD"))
    )  #: From ``lr`` to ``min_lr``; WSD: constant, then the decay below.
    lr_warmup_iters: int = attrs.field(default=0, validator=_not_negative)  #: Unit: steps.
    lr_decay_iters: int | None = None
    """Steps until ``min_lr`` is reached; default: ``train_iters``."""
    lr_wsd_decay_iters: int | None = None  #: WSD only: steps of the final decay.
    lr_wsd_decay_style: str = attrs.field(
        default="exponential",
        validator=attrs.validators.in_(("exponential", "linear", "cosine", "minus_sqrt")),
    )  #: WSD only.
    weight_decay: float = attrs.field(default=0.1, validator=_not_negative)
    """Times ``lr``: the share of a weight that a step removes."""
    adam_beta1: float = attrs.field(default=0.9, validator=_fraction)
    """Decay of the first moment per step."""
    adam_beta2: float = attrs.field(
        default=0.95, validator=_fraction
    )  #: Decay of the second moment.
    adam_eps: float = attrs.field(default=1e-8, validator=_positive)
    """Added to the root of the second moment."""
    clip_grad: float = attrs.field(default=1.0, validator=_not_negative)
    """Maximum gradient norm; 0: no clipping."""
    loss_scale: float | None = None  #: fp16 only: constant loss scale; default: dynamic.
    initial_loss_scale: float = attrs.field(default=2.0**16, validator=_positive)  #: fp16 only.
    min_loss_scale: float = attrs.field(default=1.0, validator=_positive)  #: fp16 only.
    loss_scale_window: int = attrs.field(default=1000, validator=_positive)
    """Unit: steps without overflow until the scale grows."""
    hysteresis: int = attrs.field(default=2, validator=_positive)
    """fp16 only: overflows until the scale shrinks."""


@attrs.frozen(kw_only=True)
class CheckpointSection:
    """``[checkpoint]``: when to save, how many to keep, where to resume from."""

    save: str | None = None  #: Folder of the checkpoints; default: ``<output_dir>/checkpoints``.
    save_interval: int = attrs.field(default=0, validator=_not_negative)
    """Steps between checkpoints; one is also saved at the end. 0: none. Unit: steps."""
    keep_last: int = attrs.field(default=2, validator=_not_negative)
    """Number of checkpoints to keep; 0: all."""
    load: str | None = None
    """Folder of the first checkpoint, unless ``save`` has a newer one; default: ``save``."""
    resume: bool = True  #: Resume from the run's newest valid checkpoint, if there is one.
    step: int | None = None  #: Load exactly this step; an error if it is missing or corrupt.
    max_fallback: int = attrs.field(default=2, validator=_not_negative)
    """Maximum number of corrupt newer checkpoints to skip."""


@attrs.frozen(kw_only=True)
class RunConfig:
    """The resolved configuration of a run."""

    enable: tuple[str, ...] = ()
    """Feature plugins, by canonical name, in resolved order (innermost first)."""
    platform: str = DEFAULT_PLATFORM  #: Name of its plugin.
    task: str = DEFAULT_TASK  #: Name of its plugin.
    run: RunSection = attrs.field(factory=RunSection)  #: ``[run]``.
    model: FieldSection  #: ``[model]``: the fields of Megatron's TransformerConfig.
    parallel: FieldSection  #: ``[parallel]``: those of its ModelParallelConfig.
    data: DataSection = attrs.field(factory=DataSection)  #: ``[data]``.
    train: TrainSection = attrs.field(factory=TrainSection)  #: ``[train]``.
    ddp: DdpSection = attrs.field(factory=DdpSection)  #: ``[ddp]``.
    optimizer: OptimizerSection = attrs.field(factory=OptimizerSection)  #: ``[optimizer]``.
    checkpoint: CheckpointSection = attrs.field(factory=CheckpointSection)  #: ``[checkpoint]``.
    plugins: Mapping[str, Any] = attrs.field(factory=dict, converter=FrozenMapping)
    """Plugin name -> its frozen options."""
