"""The hook points, in the order in which a run reaches them.

A hook's decorator says its kind (see ``HookKind``), the part of a run that it belongs to, the claim
that whoever implements it must make, and whether it is torch-free: called in the launcher and by
``plan`` as well, before torch is imported.

Hooks are called while the run is being built and answer values; the hot path is what they answer.
An implementation may take any subset of a hook's arguments. A hook may answer None only while its
manifest's ``idle`` condition holds, or where its contract here says so.

One rule for the arguments of every hook that builds a part of a model: ``config``; ``device``, this
rank's; ``groups``, Megatron's ProcessGroupCollection; ``role``, that of the model being built
(``policy``, ``reference`` ...); and where it is asked once a layer ``layer_index``, the position in
the whole model, from 0, not in this pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .hook_kinds import (
    PROJECT,
    HookKind,
    Point,
    contribution,
    hookimpl,
    listener,
    provider,
    wrapper,
)
from .manifest import Claim

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from . import contracts as c
    from .config import RunConfig
    from .layout import Layout

__all__ = ["PROJECT", "HookKind", "hookimpl"]


# -- before the process group exists ----------------------------------------------------------


@contribution(point=Point.RUN, torch_free=True)
def ascend_check(config: RunConfig, layout: Layout) -> Sequence[str]:
    """Name what in this run the plugin cannot do.

    When: after resolution, before any process starts. Combining: all problems, of all plugins and
    of the layout itself, stand in one refusal.

    Returns:
        A sentence a problem: the option, the value, what was expected and values that would work.
    """


@contribution(point=Point.COMM, torch_free=True)
def ascend_environment(config: RunConfig, local_world_size: int) -> Mapping[str, str]:
    """Environment variables that must be set before the process starts.

    When: in the launcher, or first thing in the process where something else launched it.

    Args:
        local_world_size: Ranks that ascend-run starts on this machine; 1 where something else
            starts them, which then sees to how they share it.
    """


@contribution(point=Point.COMM, torch_free=True)
def ascend_process_groups(
    config: RunConfig, layout: Layout
) -> Mapping[str, Sequence[Sequence[int]]]:
    """Process groups of the plugin's own: name -> rank lists.

    When: planned before the run; created by core on every rank, in the order of the names, after
    Megatron's own. A rank finds its own group as ``groups.<name>``.
    """


@contribution(point=Point.RUN, torch_free=True)
def ascend_cost(config: RunConfig, layout: Layout, rank: c.RankKind) -> c.CostChange | None:
    """What the plugin changes in memory, messages and FLOPs, by formula.

    When: while a run is planned, once for each pipeline stage; nothing is measured or allocated.
    Combining: changes are applied to the plain model's numbers in resolved order, innermost first.

    Args:
        rank: The ranks that are asked about, with the numbers of the plain model.

    Returns:
        The change; None where there is none.
    """


@contribution(point=Point.RUN)
def ascend_patches() -> Sequence[c.Patch]:
    """Functions of others to replace for the length of the run; the last resort.

    When: before Megatron is used. Core checks the version and the hash, applies, and undoes.
    Two patches of one target are an error that names both plugins.
    """


@contribution(point=Point.RUN)
def ascend_process_settings(config: RunConfig) -> Mapping[str, AbstractContextManager[Any]]:
    """Settings of the whole process that hold for the length of a run, such as torch's switches:
    name of the setting -> context manager that sets it and puts back what was.

    When: entered on every rank before its process groups and models exist, in resolved order, and
    left after them in reverse, whatever happens. Two of one name are an error that names both
    plugins.
    """


# -- device and configuration -----------------------------------------------------------------


@provider(point=Point.RUN, claim=Claim.PLATFORM)
def ascend_device(local_rank: int) -> c.Device:
    """This rank's device. Answered by the platform."""


@wrapper(point=Point.MODEL)
def ascend_configure(
    config: RunConfig, device: c.Device, groups: Any, role: str
) -> c.Wrapper[Mapping[str, Any]]:
    """Change the arguments of Megatron's TransformerConfig.

    When: once for each model, before the TransformerConfig is made. Where Megatron already does
    the work, a plugin is this hook.

    Returns:
        A function from the arguments to the new arguments. One that changes its input is refused.
    """


@provider(point=Point.MODEL, claim=Claim.MODEL_FAMILY, torch_free=True)
def ascend_model_family() -> c.ModelFamily:
    """The family of the model, as data. Answered by a plugin of ``ascend_run.models``."""


@provider(point=Point.RUN, claim=Claim.TASK)
def ascend_task(config: RunConfig) -> c.Task:
    """What is trained. Answered by a plugin of ``ascend_run.tasks``."""


# -- model build ------------------------------------------------------------------------------


@contribution(point=Point.MODEL, torch_free=True)
def ascend_empty_layers(config: RunConfig) -> Sequence[int]:
    """Places in the model, from 0, that hold no layer: what enters leaves unchanged.

    ``model.num_layers`` counts places; they are what a pipeline deals out and what
    ``layer_index`` means. The layers are numbered without the empty ones in the names of
    parameters: initial weights, checkpoints and conversions do not depend on where those are. No
    wrapper is asked for an empty place. A place that two plugins name is an error.
    """


@provider(point=Point.MODEL, claim=Claim.PLATFORM_OPS)
def ascend_platform_ops(
    config: RunConfig, device: c.Device, groups: Any, role: str
) -> c.PlatformOps:
    """The platform's fused operators. Answered by the platform."""


@wrapper(point=Point.MODEL, wraps="ascend_platform_ops")
def ascend_fused_operators(
    config: RunConfig, device: c.Device, groups: Any, role: str
) -> c.Wrapper[c.PlatformOps] | None:
    """Change entries of the table of fused operators.

    When: once for each model, before its modules are built. What comes out is what every module,
    ``ascend_experts`` and ``ascend_linear`` are given.

    Returns:
        A function from the table to a new one (``attrs.evolve``), or None to leave it alone.
    """


@provider(point=Point.MODEL, claim=Claim.NORM)
def ascend_norm(
    config: RunConfig, device: c.Device, groups: Any, role: str
) -> type[nn.Module] | None:
    """The normalisation module: a class built as ``norm(config, hidden_size, eps)``, Megatron's
    arguments, with a ``weight`` (and a ``bias`` for LayerNorm). None keeps the kernel's own."""


@provider(point=Point.ATTENTION, claim=Claim.ATTENTION_KERNEL)
def ascend_attention_kernel(
    config: RunConfig,
    device: c.Device,
    groups: Any,
    role: str,
    layer_index: int,
    ops: c.PlatformOps,
) -> c.AttentionKernel:
    """The attention on one rank's device, asked once a layer. Else the platform's.

    What the kernel declares in ``features`` is held against what the run needs, here and (where the
    manifest says it too, in ``attention``) before anything starts.

    Args:
        ops: What ``ascend_platform_ops`` answered; its ``attention_kernels`` may be chosen from.
    """


@wrapper(point=Point.ATTENTION, wraps="ascend_attention_kernel")
def ascend_attention(
    config: RunConfig, device: c.Device, groups: Any, role: str, layer_index: int
) -> c.Wrapper[c.AttentionKernel] | None:
    """Wrap the attention kernel of one layer in another kernel (sequence exchange).

    When: once a layer. The outer kernel's ``features`` are held against what the run needs, as the
    inner one's are.
    """


@provider(point=Point.ATTENTION, claim=Claim.POSITION_BIAS)
def ascend_position_bias(
    config: RunConfig, device: c.Device, groups: Any, role: str, layer_index: int
) -> c.PositionBias | None:
    """A bias of positions, added to the scores of one layer; asked once a layer.

    It has the slopes of this tensor-parallel rank's heads, and reaches the attention outside of
    every wrapper, so that who exchanges heads or sequences exchanges it as well. What adds one says
    so in its manifest's ``attention_needs``. None adds nothing.
    """


@provider(point=Point.ATTENTION, claim=Claim.SEQUENCE_EXCHANGE, torch_free=True)
def ascend_sequence_partition(config: RunConfig) -> c.SequencePartition | None:
    """How context-parallel ranks cut a sequence; a DocumentPartition cuts each document for itself,
    and the parts of an UnevenPartition may differ in length.

    The owner's cut is applied to the batch and to the rotary tables alike. Without an owner a
    context-parallel size above 1 is refused.
    """


@provider(point=Point.MOE, claim=Claim.ROUTER)
def ascend_router(
    config: RunConfig, device: c.Device, groups: Any, role: str
) -> Callable[..., nn.Module] | None:
    """The MoE router: a class built with Megatron's RouterBuilder arguments
    (``config``, ``pg_collection``). None keeps the kernel's own."""


@wrapper(point=Point.MOE)
def ascend_token_dispatcher(
    config: RunConfig, device: c.Device, groups: Any, role: str, layer_index: int
) -> c.Wrapper[Any] | None:
    """Wrap one MoE layer's token dispatcher (Megatron's six-stage MoETokenDispatcher)."""


@provider(point=Point.MOE, claim=Claim.EXPERTS)
def ascend_experts(
    config: RunConfig, device: c.Device, groups: Any, role: str, ops: c.PlatformOps
) -> c.ExpertsKernel | None:
    """The computation of the local experts. The parameters are the kernel's own in any case, so
    checkpoints do not depend on the plugin. None keeps the plain loop.

    Args:
        ops: What ``ascend_platform_ops`` answered, inside ``ascend_fused_operators``; a kernel
            takes from it what it can.
    """


@provider(point=Point.MODEL, claim=Claim.LOSS)
def ascend_loss(config: RunConfig, device: c.Device, groups: Any, role: str) -> c.LossKernel | None:
    """Cross-entropy. None keeps the kernel's own."""


@wrapper(point=Point.MODEL)
def ascend_linear(
    config: RunConfig,
    device: c.Device,
    groups: Any,
    role: str,
    name: str,
    layer_index: int,
    ops: c.PlatformOps,
) -> c.Wrapper[nn.Module] | None:
    """Wrap one parallel linear (Megatron's Column- or RowParallelLinear) of a layer.

    Args:
        name: Its name in the layer: ``self_attention.linear_qkv``, ``mlp.linear_fc1`` ...
        ops: The model's table of fused operators.

    Returns:
        A function from the module to its replacement. It must keep ``state_dict`` keys of what
        was there; a parameter that it adds carries ``ascend_added_by``, the plugin's name, since no
        model family knows it. None leaves it alone; so for each wrapper of a module below.
    """


@wrapper(point=Point.MODEL)
def ascend_embedding(
    config: RunConfig, device: c.Device, groups: Any, role: str
) -> c.Wrapper[nn.Module] | None:
    """Wrap the token embedding (on the first pipeline stage)."""


@wrapper(point=Point.ATTENTION)
def ascend_self_attention(
    config: RunConfig, device: c.Device, groups: Any, role: str, layer_index: int
) -> c.Wrapper[nn.Module] | None:
    """Wrap one layer's attention, projections included."""


@wrapper(point=Point.MODEL)
def ascend_mlp(
    config: RunConfig, device: c.Device, groups: Any, role: str, layer_index: int
) -> c.Wrapper[nn.Module] | None:
    """Wrap one layer's dense feed-forward."""


@wrapper(point=Point.MOE)
def ascend_moe_layer(
    config: RunConfig, device: c.Device, groups: Any, role: str, layer_index: int
) -> c.Wrapper[nn.Module] | None:
    """Wrap one layer's mixture of experts: router, dispatcher and experts."""


@wrapper(point=Point.MODEL)
def ascend_layer(
    config: RunConfig, device: c.Device, groups: Any, role: str, layer_index: int, num_layers: int
) -> c.Wrapper[nn.Module] | None:
    """Wrap one whole transformer layer; ``num_layers`` counts the whole model."""


@wrapper(point=Point.MODEL)
def ascend_output_layer(
    config: RunConfig, device: c.Device, groups: Any, role: str
) -> c.Wrapper[nn.Module] | None:
    """Wrap the output projection (on the last pipeline stage). Where one does, the loss is taken
    from its logits rather than fused with it."""


@wrapper(point=Point.MODEL)
def ascend_model(
    config: RunConfig, device: c.Device, groups: Any, role: str
) -> c.Wrapper[nn.Module] | None:
    """Wrap a whole model chunk, after every part of it is wrapped and before data parallelism."""


# -- optimizer --------------------------------------------------------------------------------


@provider(point=Point.OPTIMIZER, claim=Claim.DATA_PARALLEL)
def ascend_data_parallel(config: RunConfig) -> Callable[..., nn.Module] | None:
    """Gradient reduction: a builder with the keyword arguments of Megatron's
    DistributedDataParallel (``config, ddp_config, module, pg_collection``). Claim:
    ``data-parallel``. None keeps Megatron's."""


@wrapper(point=Point.OPTIMIZER)
def ascend_param_groups(config: RunConfig, role: str) -> c.Wrapper[list[dict[str, Any]]] | None:
    """Change the optimizer's parameter groups: ``params``, ``lr_mult``, ``wd_mult``,
    ``is_expert_parallel`` as Megatron names them."""


@provider(point=Point.OPTIMIZER, claim=Claim.OPTIMIZER)
def ascend_optimizer(config: RunConfig) -> Callable[..., Any] | None:
    """The inner optimizer: a class built as torch.optim's are, from parameter groups. Claim:
    ``optimizer``. None keeps AdamW (fused where torch has it)."""


# -- data, comm, checkpoint -------------------------------------------------------------------


@provider(point=Point.RUN, claim=Claim.DATASET)
def ascend_dataset(config: RunConfig) -> Callable[..., Any] | None:
    """Low-level token storage: ``(prefix) -> sequence of documents``. None keeps Megatron's
    IndexedDataset."""


@wrapper(point=Point.RUN)
def ascend_batch(
    config: RunConfig, end_of_document: Callable[[], int]
) -> c.Wrapper[c.BatchIterator] | None:
    """Wrap the iterator of micro-batches, before the sequence is cut.

    Args:
        end_of_document: Answers the id of the token that ends a document, from the tokenizer or the
            record beside the data; a DataError says that neither names one.
    """


@wrapper(point=Point.OPTIMIZER)
def ascend_schedule(config: RunConfig) -> c.Wrapper[Callable[..., Any]] | None:
    """Wrap Megatron's forward-backward function."""


@provider(point=Point.CHECKPOINT, claim=Claim.CHECKPOINT_STORE)
def ascend_checkpoint_store(config: RunConfig, folder: str) -> c.CheckpointStore | None:
    """Where checkpoints go. None keeps the kernel's own."""


@wrapper(point=Point.CHECKPOINT, wraps="ascend_checkpoint_store")
def ascend_checkpoint_transfer(context: c.RunContext) -> c.Wrapper[c.CheckpointStore] | None:
    """Wrap the checkpoint store: what passes between the run's tensors and where checkpoints live.

    When: once for each store that a run opens (to save to, and to load from where that is another).
    The innermost wrapper is given what ``ascend_checkpoint_store`` answered, or the kernel's own.

    Returns:
        A function from the store to one that saves and loads the same; None leaves it alone.
    """


@contribution(point=Point.CHECKPOINT)
def ascend_checkpoint_entries(context: c.RunContext) -> Mapping[str, c.CheckpointEntry]:
    """State of the plugin's own to save and restore: name -> entry."""


@wrapper(point=Point.CHECKPOINT)
def ascend_checkpoint_filter(
    config: RunConfig, role: str
) -> c.Wrapper[Sequence[c.ShardPiece]] | None:
    """Change which pieces of a model are saved and loaded (adapters, frozen parts).

    What is left out is, where a run goes on, what it began with: the weights of ``model.hf_path``,
    or those that the seed gives.
    """


# -- readings ---------------------------------------------------------------------------------


@contribution(point=Point.RUN)
def ascend_metrics(context: c.RunContext) -> Mapping[str, c.Metrics]:
    """Readings to log: group name -> function that gives named values."""


@contribution(point=Point.RUN, torch_free=True)
def ascend_report() -> Sequence[c.ReportPanel]:
    """Curves for ``report.html``, one panel for each; a title is given once."""


# -- events, on every rank unless the contract says otherwise -----------------------------------


@listener()
def ascend_before_run(context: c.RunContext) -> None:
    """Everything is built and restored; the first step comes next."""


@listener()
def ascend_before_step(context: c.RunContext) -> None:
    """An optimizer step begins."""


@listener()
def ascend_after_step(context: c.RunContext) -> None:
    """An optimizer step is done; ``context.step`` counts it.

    With ``ddp.overlap_param_gather`` the weights are whole only from the next forward on, or from
    the next evaluation, checkpoint or end of the run: do not read them here.
    """


@listener()
def ascend_after_log(context: c.RunContext, metrics: Mapping[str, c.Reading]) -> None:
    """The readings of a logged step are there: this rank's own speed and memory, and the loss of
    all. Only rank 0 writes them to the log."""


@listener()
def ascend_before_evaluation(context: c.RunContext) -> None:
    """Evaluation on held-out data begins."""


@listener()
def ascend_after_evaluation(context: c.RunContext, loss: float) -> None:
    """Evaluation is done; the loss is the mean over all held-out tokens read, on all ranks."""


@listener()
def ascend_after_checkpoint(context: c.RunContext, path: str) -> None:
    """A checkpoint was published."""


@listener()
def ascend_after_failure(context: c.RunContext, error: BaseException) -> None:
    """The run is ending by an exception; called on the rank that raised it, before
    ``ascend_after_run``. What a listener raises is logged and stops neither others nor the end."""


@listener()
def ascend_after_run(context: c.RunContext) -> None:
    """The last step is done, or the run has failed; always called once the ranks are connected.

    Where what failed was the building of a model, ``context.models`` has those built before.
    """
