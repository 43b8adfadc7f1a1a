"""The frozen, resolved configuration of a run: what every plugin is given and none can change.

``[model]`` and ``[parallel]`` hold every field of the installed Megatron's TransformerConfig under
Megatron's own name: ``[parallel]`` those that it inherits from ModelParallelConfig (the layout of
ranks and communication), ``[model]`` the others. Which fields exist is read from Megatron's source,
so neither this module nor a plugin needs torch to know them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

DEFAULT_PLATFORM: Final = "cpu"
DEFAULT_TASK: Final = "pretrain"
DEFAULT_FAMILY: Final = "llama"
"""The plugins that a run has where the user names none: the only ones that the kernel names."""

_positive: Any = attrs.validators.gt(0)
_not_negative: Any = attrs.validators.ge(0)
_fraction: Any = attrs.validators.and_(_not_negative, attrs.validators.lt(1))


class FrozenMapping(Mapping[str, Any]):
    """A mapping that nobody changes, nor the lists in it: they are kept as tuples."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        self._values = {name: _frozen(value) for name, value in dict(values).items()}

    def __getstate__(self) -> dict[str, Any]:
        return self._values

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._values = state

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return FrozenMapping(value) if isinstance(value, dict) else value


class FieldSection(FrozenMapping):
    """Megatron's fields of one section, read as attributes: ``config.model.num_layers``.

    Raises:
        AttributeError: The installed Megatron has no such field.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for these before _values exists
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}") from None


@attrs.frozen(kw_only=True)
class RunSection:
    """``[run]``: where the run lives and what makes it repeatable."""

    output_dir: str = "runs/default"
    """Folder of the run: resolved config, plan, metrics, log, checkpoints, report."""
    seed: int = attrs.field(default=1234, validator=_not_negative)
    nproc: int = attrs.field(default=1, validator=_positive)
    """Ranks to start on this machine, where nothing else has started them."""
    timeout_seconds: int = attrs.field(default=600, validator=_positive)
    """A collective that takes longer is a failure."""


@attrs.frozen(kw_only=True)
class DataSection:
    """``[data]``: token files (``.bin`` and ``.idx``, named by their common prefix)."""

    train: tuple[str, ...] = ()
    """Prefixes of the training datasets."""
    train_weights: tuple[float, ...] = ()
    """Share of each training dataset; empty means in proportion to their tokens."""
    validation: tuple[str, ...] = ()
    """Prefixes of the held-out datasets."""
    validation_weights: tuple[float, ...] = ()
    tokenizer: str | None = None
    """Path of the ``tokenizer.json`` that the datasets were made with."""
    seq_length: int = attrs.field(default=1024, validator=_positive)
    """Unit: tokens."""
    eod_mask_loss: bool = False
    """Leave the end-of-document token out of the loss."""
    cache_dir: str | None = None
    """Folder of the sample indices; default: ``<output_dir>/index-cache``."""


@attrs.frozen(kw_only=True)
class TrainSection:
    """``[train]``: steps, batches, precision."""

    train_iters: int = attrs.field(default=100, validator=_not_negative)
    """Unit: optimizer steps."""
    micro_batch_size: int = attrs.field(default=1, validator=_positive)
    """Unit: sequences on one data-parallel rank in one forward."""
    global_batch_size: int = attrs.field(default=1, validator=_positive)
    """Unit: sequences in one optimizer step, over all ranks."""
    precision: str = attrs.field(
        default="bf16", validator=attrs.validators.in_(("bf16", "fp16", "fp32"))
    )
    eval_interval: int = attrs.field(default=0, validator=_not_negative)
    """Evaluate every so many steps; 0 evaluates never. Unit: steps."""
    eval_iters: int = attrs.field(default=10, validator=_positive)
    """Unit: global batches of held-out data in one evaluation."""
    log_interval: int = attrs.field(default=1, validator=_positive)
    """Unit: steps."""


@attrs.frozen(kw_only=True)
class DdpSection:
    """``[ddp]``: gradient reduction, and who holds the optimizer's state; names of Megatron's
    DistributedDataParallelConfig."""

    use_distributed_optimizer: bool = False
    """Spread the optimizer's state over the data-parallel ranks: each steps its share of the
    parameters, and they gather the rest."""
    overlap_grad_reduce: bool = False
    """Reduce the gradients of a bucket of parameters while backward goes on."""
    overlap_param_gather: bool = False
    """Gather the parameters of a bucket while the next forward runs."""
    bucket_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_positive)
    )
    """What is reduced at once where it overlaps; default: 40 million, or a million for each
    data-parallel rank if that is more. Unit: parameters."""


@attrs.frozen(kw_only=True)
class OptimizerSection:
    """``[optimizer]``: Megatron's names; AdamW, arXiv:1711.05101."""

    lr: float = attrs.field(default=3e-4, validator=_not_negative)
    min_lr: float = attrs.field(default=0.0, validator=_not_negative)
    lr_decay_style: str = attrs.field(
        default="cosine", validator=attrs.validators.in_(("constant", "linear", "cosine", "WSD"))
    )
    lr_warmup_iters: int = attrs.field(default=0, validator=_not_negative)
    """Unit: steps."""
    lr_decay_iters: int | None = None
    """Steps until ``min_lr`` is reached; default: ``train_iters``."""
    lr_wsd_decay_iters: int | None = None
    """WSD only: steps of the final decay."""
    lr_wsd_decay_style: str = attrs.field(
        default="exponential",
        validator=attrs.validators.in_(("exponential", "linear", "cosine", "minus_sqrt")),
    )
    weight_decay: float = attrs.field(default=0.1, validator=_not_negative)
    adam_beta1: float = attrs.field(default=0.9, validator=_fraction)
    adam_beta2: float = attrs.field(default=0.95, validator=_fraction)
    adam_eps: float = attrs.field(default=1e-8, validator=_positive)
    clip_grad: float = attrs.field(default=1.0, validator=_not_negative)
    """Largest norm of the gradient; 0 does not clip."""
    loss_scale: float | None = None
    """fp16 only: a constant scale; default: dynamic."""
    initial_loss_scale: float = attrs.field(default=2.0**16, validator=_positive)
    min_loss_scale: float = attrs.field(default=1.0, validator=_positive)
    loss_scale_window: int = attrs.field(default=1000, validator=_positive)
    """Unit: steps without overflow before the scale grows."""
    hysteresis: int = attrs.field(default=2, validator=_positive)


@attrs.frozen(kw_only=True)
class CheckpointSection:
    """``[checkpoint]``: when to save, what to keep, where to resume from."""

    save: str | None = None
    """Folder of the checkpoints; default: ``<output_dir>/checkpoints``."""
    save_interval: int = attrs.field(default=0, validator=_not_negative)
    """Save every so many steps and at the end; 0 saves never. Unit: steps."""
    keep_last: int = attrs.field(default=2, validator=_not_negative)
    """How many to keep; 0 keeps all."""
    load: str | None = None
    """Folder to begin from, while ``save`` holds nothing newer of this run; default: ``save``."""
    resume: bool = True
    """Go on from the run's own newest sound checkpoint, where there is one."""
    step: int | None = None
    """Begin at exactly this step; an error where it is missing or corrupt."""
    max_fallback: int = attrs.field(default=2, validator=_not_negative)
    """How many corrupt newer checkpoints may be passed over."""


@attrs.frozen(kw_only=True)
class RunConfig:
    """A whole run, resolved."""

    enable: tuple[str, ...] = ()
    """Feature plugins, by canonical name, in resolved order (innermost first)."""
    platform: str = DEFAULT_PLATFORM
    task: str = DEFAULT_TASK
    run: RunSection = attrs.field(factory=RunSection)
    model: FieldSection
    parallel: FieldSection
    data: DataSection = attrs.field(factory=DataSection)
    train: TrainSection = attrs.field(factory=TrainSection)
    ddp: DdpSection = attrs.field(factory=DdpSection)
    optimizer: OptimizerSection = attrs.field(factory=OptimizerSection)
    checkpoint: CheckpointSection = attrs.field(factory=CheckpointSection)
    plugins: Mapping[str, Any] = attrs.field(factory=dict, converter=FrozenMapping)
    """Plugin name -> its own frozen options."""
