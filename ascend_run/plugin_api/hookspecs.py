"""The hook points, in the order in which a run reaches them.

A hook's decorator declares its kind (see ``HookKind``), the part of a run that it belongs to, the
claim that implementing it implies, whether it is torch-free (also called in the launcher and by
``plan``, before torch is imported), and, if no built-in plugin implements it yet, the planned
feature that will be the first.

Hooks are called while the run is being built and return values; only the returned objects are on
the hot path. An implementation may take any subset of a hook's arguments. A hook may return None
only while its manifest's ``idle`` condition is met, or if its contract below allows it.

All hooks that build a part of a model share these arguments: ``config``; ``device``, this rank's;
``groups``, Megatron's ProcessGroupCollection; ``role`` of the model being built (``policy``,
``reference`` ...); and, if called once per layer, ``layer_index``, the index in the whole model,
from 0, not in this pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ascend_run.types.declarations import Claim

from .hook_kinds import HookPoint, Point, contribution, listener, provider, wrapper

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import RouterBuilder
    from torch import nn

    from ascend_run.types.config import RunConfig
    from ascend_run.types.layout import Layout

    from . import contracts as c
    from .manifest import Manifest

# -- before the process group exists ----------------------------------------------------------


@contribution(point=Point.RUN, torch_free=True)
def ascend_defaults(config: RunConfig, manifests: Sequence[Manifest]) -> Mapping[str, object]:
    """Return defaults that follow from the plugin's options, or from what the enabled plugins
    (``manifests``) declare: config key -> value.

    When: once the config is read, before it is checked. What the model family, a Hugging Face
    folder or the user sets takes precedence; ``ascend_check`` can compare.
    """


@contribution(point=Point.RUN, torch_free=True)
def ascend_check(
    config: RunConfig,
    layout: Layout,
    manifests: Sequence[Manifest],
    model_differences: Callable[[str], Sequence[str]],
) -> Sequence[str]:
    """Check that the plugin supports this run.

    When: after resolution, before any process starts. Combining: the problems of all plugins and of
    the layout are reported in one error.

    Args:
        manifests: Of the enabled plugins: what the others declare, whichever they are.
        model_differences: Returns the ``[model]`` fields that the model in another Hugging Face
            folder has otherwise, with both values; raises ConfigError if it cannot be read.

    Returns:
        One message per problem: the option, the value, what was expected, and valid values.
    """


@contribution(point=Point.COMM, torch_free=True)
def ascend_environment(config: RunConfig, local_world_size: int) -> Mapping[str, str]:
    """Return environment variables that must be set before the process starts.

    When: in the launcher; at the start of the process if another launcher started it.

    Args:
        local_world_size: Ranks that ascend-run starts on this machine; 1 if another launcher starts
            them, which is then responsible for how they share the machine.
    """


@contribution(point=Point.COMM, torch_free=True)
def ascend_process_groups(
    config: RunConfig, layout: Layout
) -> Mapping[str, Sequence[Sequence[int]]]:
    """Return additional process groups: name -> rank lists.

    When: planned before the run; created by core on every rank, in the order of their names, after
    Megatron's groups. A rank's own group is ``groups.<name>``.
    """


@contribution(point=Point.RUN, torch_free=True)
def ascend_cost(config: RunConfig, layout: Layout, rank: c.PipelineStage) -> c.CostChange | None:
    """Estimate how the plugin changes memory, communication and FLOPs.

    When: while a run is planned, once per pipeline stage; nothing is measured or allocated.
    Combining: changes are applied to the plain model's estimate in resolved order, innermost first.

    Args:
        rank: The ranks of the stage, with the plain model's estimate.

    Returns:
        The change; None if there is none.
    """


@contribution(point=Point.COMM, torch_free=True)
def ascend_comm_options(
    config: RunConfig, layout: Layout, communication: Sequence[c.Communication]
) -> Mapping[str, c.CommOptions]:
    """Return options of communicators by process group, from what ``plan`` counts in a step.

    When: while a run is planned; at the start of each process if another launcher started it.
    """


@contribution(point=Point.RUN)
def ascend_patches() -> Sequence[c.Patch]:
    """Return functions of other packages to replace for the duration of the run; the last resort.

    When: on every rank, after its device is active and before Megatron is used; patches are undone
    before the device is deactivated. Core checks versions and source hashes, applies all or none,
    and undoes them in reverse order. Two patches of one target are an error that names both.
    """


@contribution(point=Point.RUN)
def ascend_phase(
    context: c.RunContext, phase: c.RunPhase
) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return what surrounds a phase of the run: a function that returns a context manager, which is
    entered each time that the phase begins.

    When: on every rank, before the phase first begins, maybe more than once. Combining: the first
    plugin's is innermost. All are exited even if the phase fails. None leaves the phase alone.
    """


@contribution(point=Point.RUN)
def ascend_process_settings(config: RunConfig) -> Mapping[str, AbstractContextManager[Any]]:
    """Return process-wide settings for the duration of the run, such as global flags of torch: name
    of the setting -> context manager that sets and restores it.

    When: entered on every rank in resolved order, before its process groups and models exist, and
    exited in reverse order after them, even if the run fails. Two settings of one name are an error
    that names both plugins.
    """


# -- device and configuration -----------------------------------------------------------------


@provider(point=Point.RUN, claim=Claim.PLATFORM)
def ascend_device(local_rank: int) -> c.Device:
    """Return this rank's device. Implemented by the platform.

    When: on every rank, before its process groups exist.
    """


@contribution(point=Point.RUN)
def ascend_machine_choices(config: RunConfig) -> Mapping[str, str]:
    """Values of options that the run's numbers depend on and the config may leave to the machine:
    config key -> the value that makes the same choice on any machine.

    When: on every rank, once its process groups exist and before models do; more than once, with
    the same result. The run folder and every checkpoint keep them. A run that resumes with another
    choice than its checkpoint was made with warns, with the value that would go on as before.

    Returns:
        A value for each option that counts in this run, also where the config has named it.
    """


@wrapper(point=Point.MODEL)
def ascend_configure(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str
) -> c.Wrapper[Mapping[str, Any]]:
    """Change the arguments of Megatron's TransformerConfig.

    When: once per model, before the TransformerConfig is built. If Megatron already implements a
    feature, its plugin needs only this hook.

    Returns:
        A function from the arguments to new arguments. Modifying its input is an error.
    """


@provider(point=Point.MODEL, claim=Claim.MODEL_FAMILY, torch_free=True)
def ascend_model_family() -> c.ModelFamily:
    """Return the model family, as data. Implemented by plugins of the group ``ascend_run.models``.

    When: when the config is read, and when a Hugging Face folder is loaded or converted.
    """


@provider(point=Point.RUN, claim=Claim.TASK)
def ascend_task(config: RunConfig) -> c.Task:
    """Return the task. Implemented by plugins of the group ``ascend_run.tasks``.

    When: on every rank, before its models are built.
    """


# -- model build ------------------------------------------------------------------------------


@contribution(point=Point.MODEL, torch_free=True)
def ascend_empty_layers(config: RunConfig) -> Sequence[int]:
    """Return the layer slots, from 0, that hold no layer and pass their input through.

    When: when a run is planned, and once per model, before its modules are built.

    ``model.num_layers`` counts layer slots, which are distributed over pipeline stages and which
    ``layer_index`` refers to. Parameter names number the layers without empty slots, so that
    initial weights, checkpoints and conversions do not depend on them. No wrapper is called for an
    empty slot. A slot returned by two plugins is an error. Layers of multi-token prediction have
    the indices that follow ``model.num_layers``, and are wrapped like the others.
    """


@provider(point=Point.MODEL, claim=Claim.PLATFORM_OPS)
def ascend_platform_ops(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str
) -> c.PlatformOps:
    """Return the platform's fused operators. Implemented by the platform.

    When: once per model, before its modules are built.
    """


@wrapper(point=Point.MODEL, wraps="ascend_platform_ops")
def ascend_fused_operators(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str
) -> c.Wrapper[c.PlatformOps] | None:
    """Change entries of the table of fused operators.

    When: once per model, before its modules are built. The resulting table is passed to every
    module, ``ascend_experts`` and ``ascend_linear``.

    Returns:
        A function from the table to a new one (``attrs.evolve``), or None to leave it alone.
    """


@provider(point=Point.MODEL, claim=Claim.NORM, first_user="tp-2d")
def ascend_norm(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str
) -> type[nn.Module] | None:
    """Return the norm module: a class built as ``norm(config, hidden_size, eps)``, Megatron's
    arguments, with a ``weight`` (and a ``bias`` for LayerNorm). Its output has the weight's dtype
    even if its input is float32 (``model.fp32_residual_connection``). None keeps the built-in norm.

    When: once per model, before its modules are built.
    """


@provider(point=Point.ATTENTION, claim=Claim.ATTENTION_KERNEL)
def ascend_attention_kernel(
    config: RunConfig,
    device: c.Device,
    groups: ProcessGroupCollection,
    role: str,
    layer_index: int,
    ops: c.PlatformOps,
) -> c.AttentionKernel:
    """Return the attention kernel of one layer. The default is the platform's.

    When: once per layer, when its modules are built.

    The kernel's ``features`` are checked against what the run needs, here and, if the manifest
    declares them in ``attention``, before anything starts.

    Args:
        ops: The platform's operators; one of its ``attention_kernels`` may be chosen.
    """


@wrapper(point=Point.ATTENTION, wraps="ascend_attention_kernel")
def ascend_attention(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str, layer_index: int
) -> c.Wrapper[c.AttentionKernel] | None:
    """Wrap the attention kernel of one layer in another kernel (context parallelism).

    When: once per layer, when its modules are built. The outer kernel's ``features`` are checked
    against what the run needs, like the inner one's.
    """


@provider(point=Point.ATTENTION, claim=Claim.POSITION_BIAS)
def ascend_position_bias(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str, layer_index: int
) -> c.PositionBias | None:
    """Return a position bias, which is added to the attention scores of one layer.

    When: once per layer, when its modules are built.

    It has the slopes of this tensor-parallel rank's heads, and is passed to the outermost attention
    wrapper, so that wrappers which redistribute heads or sequences redistribute it as well. The
    manifest must declare it in ``attention_needs``. None adds no bias.
    """


@provider(point=Point.ATTENTION, claim=Claim.CONTEXT_PARALLEL, torch_free=True)
def ascend_sequence_partition(config: RunConfig) -> c.SequencePartition | None:
    """Return how a sequence is sharded over context-parallel ranks: a DocumentPartition depends on
    document boundaries, and the shards of an UnevenPartition may differ in length.

    When: when a run is planned, once per model, and before the first batch.

    The partition is applied to the batch and to the rotary tables. Without an owner, a
    context-parallel size above 1 is an error.
    """


@provider(point=Point.MOE, claim=Claim.ROUTER, first_user="moe-routing-replay")
def ascend_router(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str
) -> RouterBuilder | None:
    """Return the MoE router: a class built with Megatron's RouterBuilder arguments
    (``config``, ``pg_collection``). None keeps the built-in router.

    When: once per model, before its modules are built.
    """


@wrapper(point=Point.MOE)
def ascend_token_dispatcher(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str, layer_index: int
) -> c.Wrapper[c.TokenDispatcher] | None:
    """Wrap one MoE layer's token dispatcher (Megatron's six-stage MoETokenDispatcher).

    When: once per layer with experts, after the model's modules are built.
    """


@provider(point=Point.MOE, claim=Claim.EXPERTS)
def ascend_experts(
    config: RunConfig,
    device: c.Device,
    groups: ProcessGroupCollection,
    role: str,
    ops: c.PlatformOps,
) -> c.ExpertsKernel | None:
    """Return the computation of the local experts. The kernel owns the parameters, so checkpoints
    do not depend on the plugin. None keeps the loop over experts.

    When: once per model, before its modules are built.

    Args:
        ops: The platform's operators, as wrapped by ``ascend_fused_operators``.
    """


@provider(point=Point.MODEL, claim=Claim.WEIGHT_STORAGE)
def ascend_weight_storage(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str
) -> c.WeightStorage | None:
    """Return how the weights of the layers' linears are stored between uses. None: as they are.

    When: once per model, before its modules are built. Such a weight is a parameter without memory
    (on torch's meta device), is packed as soon as it has its initial or its loaded values, so that
    one is full at a time, must be frozen, and is not part of checkpoints.
    """


@wrapper(point=Point.MODEL)
def ascend_linear(
    config: RunConfig,
    device: c.Device,
    groups: ProcessGroupCollection,
    role: str,
    name: str,
    layer_index: int,
    ops: c.PlatformOps,
) -> c.ModuleWrapper | None:
    """Wrap one parallel linear (Megatron's Column- or RowParallelLinear) of a layer.

    When: once per linear and layer, after the model's modules are built.

    Args:
        name: Its name in the layer: ``self_attention.linear_qkv``, ``mlp.linear_fc1`` ...; the
            projection of a layer of multi-token prediction is ``eh_proj``.
        ops: The model's table of fused operators.

    Returns:
        A function from the module to a ``ForwardLink`` around its forward, to links around its
        submodules by name (``{"input_layernorm": link}``), or to its replacement. Assigning
        ``forward`` is an error. The links of one module, from all hooks, form one chain in resolved
        order; the manifest's ``forward_links`` must declare the kinds of modules. Existing
        ``state_dict`` keys must stay; an added parameter carries the attribute ``ascend_added_by``,
        the plugin's name, since model families do not know it. None leaves the module as it is. The
        same holds for the other wrappers of modules below.
    """


@wrapper(point=Point.MODEL)
def ascend_embedding(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str
) -> c.ModuleWrapper | None:
    """Wrap the token embedding (on the first pipeline stage).

    When: once per model, after its modules are built.
    """


@wrapper(point=Point.ATTENTION, first_user="tp-2d")
def ascend_self_attention(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str, layer_index: int
) -> c.ModuleWrapper | None:
    """Wrap one layer's attention, including its projections.

    When: once per layer, after its linears are wrapped.
    """


@wrapper(point=Point.MODEL)
def ascend_mlp(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str, layer_index: int
) -> c.ModuleWrapper | None:
    """Wrap one layer's dense MLP.

    When: once per layer without experts, after its linears are wrapped.
    """


@wrapper(point=Point.MOE)
def ascend_moe_layer(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str, layer_index: int
) -> c.ModuleWrapper | None:
    """Wrap one layer's mixture of experts: router, dispatcher and experts.

    When: once per layer with experts, after its token dispatcher is wrapped.
    """


@wrapper(point=Point.MODEL)
def ascend_layer(
    config: RunConfig,
    device: c.Device,
    groups: ProcessGroupCollection,
    role: str,
    layer_index: int,
    num_layers: int,
) -> c.ModuleWrapper | None:
    """Wrap one transformer layer; ``num_layers`` counts the whole model.

    When: once per layer, after its submodules are wrapped.
    """


@wrapper(point=Point.MODEL, first_user="ppo")
def ascend_output_layer(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str
) -> c.ModuleWrapper | None:
    """Wrap the output layer (on the last pipeline stage). The loss is then computed from its logits
    instead of being fused with it.

    When: once per model, after its layers are wrapped.
    """


@wrapper(point=Point.MODEL)
def ascend_model(
    config: RunConfig, device: c.Device, groups: ProcessGroupCollection, role: str
) -> c.ModuleWrapper | None:
    """Wrap a model chunk, inside of data parallelism.

    When: once per chunk and model, after all of its modules are wrapped.
    """


@contribution(point=Point.OPTIMIZER, torch_free=True)
def ascend_activation_policy(
    config: RunConfig, layer_index: int, has_experts: bool, place: int, chunk: int, num_chunks: int
) -> Mapping[str, c.ActivationTreatment] | None:
    """Return how a layer's activations are kept until backward: part -> treatment. A part is named
    like its module in Megatron's layer: ``mlp.activation_func``; ``""`` is the layer.

    When: once per layer, when a run is planned and when a model is built. Combining: two plugins
    cannot treat one part; what is within a recomputed part gets no other treatment; empty mappings
    for all layers are refused, None is not. ``plan`` counts what is recomputed or discarded.

    Args:
        place: Index in its chunk, from 0, without empty slots; after them, multi-token prediction.
        chunk: Index of the chunk on its pipeline rank, which has ``num_chunks``.
    """


# -- optimizer --------------------------------------------------------------------------------


@provider(point=Point.OPTIMIZER, claim=Claim.DATA_PARALLEL, first_user="fsdp2")
def ascend_data_parallel(config: RunConfig) -> Callable[..., nn.Module] | None:
    """Return the data-parallel wrapper: a builder with the keyword arguments of Megatron's
    DistributedDataParallel (``config, ddp_config, module, pg_collection``). None keeps
    Megatron's.

    When: once per trained model, after its modules are wrapped.
    """


@provider(point=Point.OPTIMIZER, claim=Claim.OPTIMIZER, torch_free=True)
def ascend_optimizer(config: RunConfig) -> c.OptimizerSpec | None:
    """Return the optimizer: how to build it, and the states that it keeps. None keeps AdamW.

    When: when a run is planned, and once per trained model, after it is wrapped for data
    parallelism. Its ``build`` is called then, and may import torch.
    """


@wrapper(point=Point.OPTIMIZER)
def ascend_mixed_precision_optimizer(
    config: RunConfig, device: c.Device
) -> c.Wrapper[type[c.MixedPrecisionOptimizer]] | None:
    """Wrap the class of Megatron's optimizers, which hold master weights, scale and clip: return a
    subclass with the same constructor, in which ``ascend_optimizer``'s is ``self.optimizer``.

    When: once per trained model. The class makes an optimizer of all parameters, and another one of
    experts that have process groups of their own.
    """


# -- data, comm, checkpoint -------------------------------------------------------------------


@wrapper(point=Point.RUN)
def ascend_batch(
    config: RunConfig, end_of_document: Callable[[], int]
) -> c.Wrapper[c.BatchIterator] | None:
    """Wrap the iterator of micro-batches, before the sequence is sharded.

    When: before the first step, for training and evaluation batches.

    Args:
        end_of_document: Returns the id of the end-of-document token, from the tokenizer or the
            metadata file of the dataset. Raises DataError if neither has one.
    """


@wrapper(point=Point.OPTIMIZER)
def ascend_schedule(config: RunConfig) -> c.Wrapper[Callable[..., Any]] | None:
    """Wrap Megatron's forward-backward function.

    When: before the first step, for training and evaluation.
    """


@wrapper(point=Point.CHECKPOINT)
def ascend_checkpoint_transfer(context: c.RunContext) -> c.Wrapper[c.CheckpointStore] | None:
    """Wrap the checkpoint store, which saves and loads the run's tensors.

    When: once per store that a run opens (to save to; and to load from, if that is another one).
    The innermost wrapper receives the built-in store.

    Returns:
        A function from the store to one that saves and loads the same, by calling the inner store
        or by replacing it (the manifest then claims ``checkpoint-store``). None leaves it as it is.
    """


@contribution(point=Point.CHECKPOINT)
def ascend_checkpoint_entries(context: c.RunContext) -> Mapping[str, c.CheckpointEntry]:
    """Return state of the plugin to save and restore: name -> entry.

    When: before a checkpoint is restored.
    """


@wrapper(point=Point.CHECKPOINT)
def ascend_checkpoint_filter(
    config: RunConfig, role: str
) -> c.Wrapper[Sequence[c.TensorShard]] | None:
    """Filter which shards of a model are saved and loaded (adapters, frozen parameters).

    When: at every save and load, once per model.

    A resumed run gives parameters that were left out their initial values: those of
    ``model.hf_path``, or random ones from the seed.
    """


# -- readings ---------------------------------------------------------------------------------


@contribution(point=Point.RUN)
def ascend_metrics(context: c.RunContext) -> Mapping[str, c.Metrics]:
    """Return metrics to log: group name -> function that returns values by name.

    When: before the first step; the functions are called at every logged step.
    """


@contribution(point=Point.RUN, torch_free=True)
def ascend_report() -> Sequence[c.ReportPanel]:
    """Return panels for ``report.html``; titles must be unique.

    When: when a run is planned.
    """


@contribution(point=Point.RUN)
def ascend_out_of_memory(context: c.RunContext) -> Callable[[], bool] | None:
    """Return a function that is called where memory has run out, and returns whether the plugin has
    freed some or needs less from now on, so that the step may be tried again. None: it never does.

    When: once, before the first step. The function: after torch.OutOfMemoryError in forward or
    backward; on one rank only, as others would wait for it, without ``ddp.overlap_grad_reduce``.
    Combining: they are called until one returns True. Random generators, buffers of the model and
    counts for the log are then restored, ``ascend_before_step`` is called, and the step is tried
    again with the same batch, up to 20 tries. Otherwise the error is raised.
    """


# -- events, on every rank unless the contract says otherwise -----------------------------------


@listener()
def ascend_before_run(context: c.RunContext) -> None:
    """Called after everything is built and restored, before the first step."""


@listener()
def ascend_before_step(context: c.RunContext) -> None:
    """Called before each optimizer step, and again before each further try of it."""


@listener()
def ascend_after_step(context: c.RunContext) -> None:
    """Called after each optimizer step; ``context.step`` already counts it.

    With ``ddp.overlap_param_gather`` the weights are gathered only in the next forward, or at the
    next evaluation, checkpoint or the end of the run: do not read them here.
    """


@listener()
def ascend_after_log(context: c.RunContext, metrics: Mapping[str, c.MetricValue]) -> None:
    """Called with the metrics of a logged step. Only rank 0 writes them to the log.

    Args:
        metrics: ``step``; ``loss`` (nats per token, over all ranks), ``lr``, ``grad_norm`` (before
            clipping); since the last log, ``tokens_per_second`` (of all ranks) and
            ``step_seconds``; this rank's ``memory_bytes`` and ``memory_peak_bytes``;
            ``consumed_samples``; ``expert_load``, ``expert_load_by_layer``, ``aux_loss``,
            ``mtp_1 loss``, ``dropped_share``, ``loss_scale``, ``skipped`` if the run has them;
            ``<group>/<name>`` of ``ascend_metrics``.
    """


@listener()
def ascend_before_evaluation(context: c.RunContext) -> None:
    """Called before each evaluation."""


@listener()
def ascend_after_evaluation(
    context: c.RunContext, loss: float, metrics: Mapping[str, float]
) -> None:
    """Called after each evaluation; loss and the task's metrics are means over all ranks."""


@listener()
def ascend_after_checkpoint(context: c.RunContext, path: str) -> None:
    """Called after a checkpoint was published."""


@listener()
def ascend_after_run(context: c.RunContext) -> None:
    """Called after the last step or a failure; always, once the process groups exist.

    If building a model failed, ``context.models`` has those that were built before.
    """


# -- read as data ------------------------------------------------------------------------------


@cache
def hook_points() -> Mapping[str, HookPoint]:
    """Return every hook by name, in the order in which a run reaches them."""
    marked = (getattr(function, "ascend_hook_point", None) for function in globals().values())
    return {point.name: point for point in marked if point is not None}
