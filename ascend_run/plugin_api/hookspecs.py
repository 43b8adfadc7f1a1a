"""The hook points, in the order in which a run reaches them.

Four kinds; a hook's decorator says which:

provider      exactly one plugin answers; the platform, asked last, is the default.
wrapper       every answer is a function from the inner thing to the outer; applied in resolved
              order, so the first plugin is innermost.
contribution  all answers are merged; a key given twice is an error that names both plugins.
listener      told of events; answers nothing.

Hooks are called while the run is being built and answer values; the hot path is what they answer.
Those marked *torch-free* run in the launcher as well, before torch is imported. An implementation
may take any subset of a hook's arguments. A hook may answer None only while its manifest's
``idle`` condition holds, or where its contract here says so.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pluggy

if TYPE_CHECKING:
    from torch import nn

    from . import contracts as c
    from .config import RunConfig
    from .layout import Layout

PROJECT: Final = "ascend_run"

hookimpl = pluggy.HookimplMarker(PROJECT)
_hookspec = pluggy.HookspecMarker(PROJECT)

F = TypeVar("F", bound=Callable[..., Any])


class HookKind(enum.StrEnum):
    """How the answers of several plugins combine."""

    PROVIDER = "provider"
    WRAPPER = "wrapper"
    CONTRIBUTION = "contribution"
    LISTENER = "listener"


def _kind(kind: HookKind) -> Callable[[F], F]:
    def mark(function: F) -> F:
        function.ascend_hook_kind = kind  # type: ignore[attr-defined]
        return _hookspec(function, firstresult=kind is HookKind.PROVIDER)

    return mark


provider = _kind(HookKind.PROVIDER)
wrapper = _kind(HookKind.WRAPPER)
contribution = _kind(HookKind.CONTRIBUTION)
listener = _kind(HookKind.LISTENER)


# -- before the process group exists ----------------------------------------------------------


@contribution
def ascend_check(config: RunConfig, layout: Layout) -> Sequence[str]:
    """Name what in this run the plugin cannot do. *Torch-free.*

    When: after resolution, before any process starts. Combining: all problems, of all plugins and
    of the layout itself, stand in one refusal.

    Returns:
        A sentence a problem: the option, the value, what was expected and values that would work.
    """


@contribution
def ascend_environment(config: RunConfig) -> Mapping[str, str]:
    """Environment variables that must be set before the process starts. *Torch-free.*

    When: in the launcher, or first thing in the process where something else launched it.
    """


@contribution
def ascend_process_groups(
    config: RunConfig, layout: Layout
) -> Mapping[str, Sequence[Sequence[int]]]:
    """Process groups of the plugin's own: name -> rank lists. *Torch-free.*

    When: planned before the run; created by core on every rank, in the order of the names, after
    Megatron's own. A rank finds its own group as ``groups.<name>``.
    """


@contribution
def ascend_patches() -> Sequence[c.Patch]:
    """Functions of others to replace for the length of the run; the last resort.

    When: before Megatron is used. Core checks the version and the hash, applies, and undoes.
    Two patches of one target are an error that names both plugins.
    """


# -- device and configuration -----------------------------------------------------------------


@provider
def ascend_device(local_rank: int) -> c.Device:
    """This rank's device. Answered by the platform."""


@wrapper
def ascend_configure(config: RunConfig) -> c.Wrapper[Mapping[str, Any]]:
    """Change the arguments of Megatron's TransformerConfig.

    When: once for each model, before the TransformerConfig is made. Where Megatron already does
    the work, a plugin is this hook.

    Returns:
        A function from the arguments to the new arguments; it must not change its input.
    """


@provider
def ascend_model_family() -> c.ModelFamily:
    """The family of the model, as data. *Torch-free.* Answered by a plugin of
    ``ascend_run.models``."""


@provider
def ascend_task(config: RunConfig) -> c.Task:
    """What is trained. Answered by a plugin of ``ascend_run.tasks``."""


# -- model build ------------------------------------------------------------------------------


@provider
def ascend_platform_ops(config: RunConfig) -> c.PlatformOps:
    """The platform's fused operators. Answered by the platform."""


@provider
def ascend_norm(config: RunConfig) -> type[nn.Module] | None:
    """The normalisation module: a class built as ``norm(config, hidden_size, eps)``, Megatron's
    arguments, with a ``weight`` (and a ``bias`` for LayerNorm). None keeps the kernel's own."""


@provider
def ascend_attention_kernel(config: RunConfig) -> c.AttentionKernel:
    """The attention on one rank's device. Claim: ``attention-kernel``; else the platform's."""


@wrapper
def ascend_attention(
    config: RunConfig, groups: Any, layer_index: int
) -> c.Wrapper[c.AttentionKernel] | None:
    """Wrap the attention kernel of one layer in another kernel (sequence exchange).

    When: once a layer. ``groups`` is Megatron's ProcessGroupCollection.
    """


@provider
def ascend_sequence_partition(config: RunConfig) -> c.SequencePartition | None:
    """How context-parallel ranks cut a sequence. *Torch-free.* Claim: ``sequence-exchange``.

    The owner's cut is applied to the batch and to the rotary tables alike. Without an owner a
    context-parallel size above 1 is refused.
    """


@provider
def ascend_router(config: RunConfig) -> Callable[..., nn.Module] | None:
    """The MoE router: a class built with Megatron's RouterBuilder arguments
    (``config``, ``pg_collection``). Claim: ``router``. None keeps the kernel's own."""


@wrapper
def ascend_token_dispatcher(config: RunConfig, layer_index: int) -> c.Wrapper[Any] | None:
    """Wrap one MoE layer's token dispatcher (Megatron's six-stage MoETokenDispatcher)."""


@provider
def ascend_experts(config: RunConfig) -> c.ExpertsKernel | None:
    """The computation of the local experts. Claim: ``experts``. The parameters are the kernel's
    own in any case, so checkpoints do not depend on the plugin. None keeps the plain loop."""


@provider
def ascend_loss(config: RunConfig, groups: Any) -> c.LossKernel | None:
    """Cross-entropy. Claim: ``loss``. None keeps the kernel's own."""


@wrapper
def ascend_linear(
    config: RunConfig, device: c.Device, name: str, layer_index: int
) -> c.Wrapper[nn.Module] | None:
    """Wrap one parallel linear (Megatron's Column- or RowParallelLinear) of a layer.

    Args:
        device: This rank's; so for each wrapper of a module below.
        name: Its name in the layer: ``self_attention.linear_qkv``, ``mlp.linear_fc1`` ...
        layer_index: Position in the whole model, from 0, not in this pipeline stage.

    Returns:
        A function from the module to its replacement. It must keep ``state_dict`` keys of what
        was there. None leaves it alone; so for each wrapper of a module below.
    """


@wrapper
def ascend_embedding(config: RunConfig, device: c.Device) -> c.Wrapper[nn.Module] | None:
    """Wrap the token embedding (on the first pipeline stage)."""


@wrapper
def ascend_self_attention(
    config: RunConfig, device: c.Device, layer_index: int
) -> c.Wrapper[nn.Module] | None:
    """Wrap one layer's attention, projections included."""


@wrapper
def ascend_mlp(
    config: RunConfig, device: c.Device, layer_index: int
) -> c.Wrapper[nn.Module] | None:
    """Wrap one layer's dense feed-forward."""


@wrapper
def ascend_moe_layer(
    config: RunConfig, device: c.Device, layer_index: int
) -> c.Wrapper[nn.Module] | None:
    """Wrap one layer's mixture of experts: router, dispatcher and experts."""


@wrapper
def ascend_layer(
    config: RunConfig, device: c.Device, layer_index: int, num_layers: int
) -> c.Wrapper[nn.Module] | None:
    """Wrap one whole transformer layer; ``num_layers`` counts the whole model."""


@wrapper
def ascend_output_layer(config: RunConfig, device: c.Device) -> c.Wrapper[nn.Module] | None:
    """Wrap the output projection (on the last pipeline stage). Where one does, the loss is taken
    from its logits rather than fused with it."""


@wrapper
def ascend_model(config: RunConfig, device: c.Device, role: str) -> c.Wrapper[nn.Module] | None:
    """Wrap a whole model chunk, after every part of it is wrapped and before data parallelism."""


# -- optimizer --------------------------------------------------------------------------------


@provider
def ascend_data_parallel(config: RunConfig) -> Callable[..., nn.Module] | None:
    """Gradient reduction: a builder with the keyword arguments of Megatron's
    DistributedDataParallel (``config, ddp_config, module, pg_collection``). Claim:
    ``data-parallel``. None keeps Megatron's."""


@wrapper
def ascend_param_groups(config: RunConfig, role: str) -> c.Wrapper[list[dict[str, Any]]] | None:
    """Change the optimizer's parameter groups: ``params``, ``lr_mult``, ``wd_mult``,
    ``is_expert_parallel`` as Megatron names them."""


@provider
def ascend_optimizer(config: RunConfig) -> Callable[..., Any] | None:
    """The inner optimizer: a class built as torch.optim's are, from parameter groups. Claim:
    ``optimizer``. None keeps AdamW (fused where torch has it)."""


# -- data, comm, checkpoint -------------------------------------------------------------------


@provider
def ascend_dataset(config: RunConfig) -> Callable[..., Any] | None:
    """Low-level token storage: ``(prefix) -> sequence of documents``. Claim: ``dataset``. None
    keeps Megatron's IndexedDataset."""


@wrapper
def ascend_batch(config: RunConfig) -> c.Wrapper[c.BatchIterator] | None:
    """Wrap the iterator of micro-batches, before the sequence is cut."""


@wrapper
def ascend_schedule(config: RunConfig) -> c.Wrapper[Callable[..., Any]] | None:
    """Wrap Megatron's forward-backward function."""


@provider
def ascend_checkpoint_store(config: RunConfig, folder: str) -> c.CheckpointStore | None:
    """Where checkpoints go. Claim: ``checkpoint-store``. None keeps the kernel's own."""


@contribution
def ascend_checkpoint_entries(context: c.RunContext) -> Mapping[str, c.CheckpointEntry]:
    """State of the plugin's own to save and restore: name -> entry."""


@wrapper
def ascend_checkpoint_filter(
    config: RunConfig, role: str
) -> c.Wrapper[Sequence[c.ShardPiece]] | None:
    """Change which pieces of a model are saved and loaded (adapters, frozen parts)."""


# -- readings ---------------------------------------------------------------------------------


@contribution
def ascend_metrics(context: c.RunContext) -> Mapping[str, c.Metrics]:
    """Readings to log: group name -> function that gives named values."""


@contribution
def ascend_report() -> Mapping[str, c.ReportPanel]:
    """Curves for ``report.html``. *Torch-free.*"""


# -- events -----------------------------------------------------------------------------------


@listener
def ascend_before_run(context: c.RunContext) -> None:
    """Everything is built and restored; the first step comes next."""


@listener
def ascend_before_step(context: c.RunContext) -> None:
    """An optimizer step begins."""


@listener
def ascend_after_step(context: c.RunContext) -> None:
    """An optimizer step is done; ``context.step`` counts it."""


@listener
def ascend_after_log(context: c.RunContext, metrics: Mapping[str, float]) -> None:
    """A line of metrics was written (on the rank that writes)."""


@listener
def ascend_before_evaluation(context: c.RunContext) -> None:
    """Evaluation on held-out data begins."""


@listener
def ascend_after_evaluation(context: c.RunContext, loss: float) -> None:
    """Evaluation is done; the loss is the mean over all held-out tokens read."""


@listener
def ascend_after_checkpoint(context: c.RunContext, path: str) -> None:
    """A checkpoint was published."""


@listener
def ascend_after_failure(context: c.RunContext, error: BaseException) -> None:
    """The run is ending by an exception; called on the rank that raised it."""


@listener
def ascend_after_run(context: c.RunContext) -> None:
    """The last step is done, or the run has failed; always called once built."""
