"""Build the models of a run, and the data parallelism and optimizer of those that train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import attrs
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from ascend_run.core.hooks import Hooks
from ascend_run.core.hugging_face.models import load_model
from ascend_run.core.model.build import build_model
from ascend_run.ops.linear.stored_weight import stored_weight
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import HookError
from ascend_run.types.config import FieldSection, RunConfig

from .data_parallel import wrap_data_parallel
from .frozen_pass import FrozenPass
from .optimizer import build_optimizer
from .phases import phase_scope


def build_models(
    task: c.Task,
    hooks: Hooks,
    context: c.RunContext,
    num_microbatches: int,
    *,
    dtype: torch.dtype | None = None,
    with_optimizer: bool = True,
) -> None:
    """Build the model of every role and add it to the context.

    Args:
        dtype: Parameter dtype. Default: the dtype of ``train.precision``.
        with_optimizer: If False, gradients are computed but there is no optimizer.

    Raises:
        HookError: See ``require_roles``; or a weight that is stored in another form trains.
    """
    groups = context.groups
    require_roles(task.roles, context.config)
    for role in task.roles:
        if role.is_base:
            continue
        config = role_config(context.config, role)
        weights = role.weights or config.model.hf_path
        if role.ahead:
            like = context.models[task.roles[0].name].transformer_config
            context.models[role.name] = c.ModelBundle(
                role=role.name,
                chunks=[],
                transformer_config=like,
                config=config,
                weights=weights,
                frozen=True,
            )
            continue
        with phase_scope(hooks, context, c.RunPhase.MODEL)():
            bundle = _build(hooks, context, dtype, config, role.name)
            bundle.weights = weights
            context.models[role.name] = bundle
            if role.frozen_step is None:
                require_frozen_storage(bundle)
                wrap_data_parallel(bundle, config, hooks, groups, num_microbatches)
            else:
                freeze(bundle)
        if role.frozen_step is None and with_optimizer:
            with phase_scope(hooks, context, c.RunPhase.OPTIMIZER)():
                build_optimizer(bundle, hooks, context)
    context.frozen_pass = FrozenPass(hooks, partial(_fill, hooks, dtype))


def role_config(config: RunConfig, role: c.RoleSpec) -> RunConfig:
    """Return the config of a role's model."""
    return attrs.evolve(config, model=FieldSection({**config.model, **role.model}))


def _build(
    hooks: Hooks, context: c.RunContext, dtype: torch.dtype | None, config: RunConfig, role: str
) -> c.ModelBundle:
    bundle = build_model(config, hooks, context.groups, context.device, role=role, dtype=dtype)
    match_p2p(bundle.transformer_config)
    return bundle


def _fill(
    hooks: Hooks, dtype: torch.dtype | None, context: c.RunContext, bundle: c.ModelBundle
) -> None:
    """Build the chunks of a frozen model and load its weights."""
    with phase_scope(hooks, context, c.RunPhase.MODEL)():
        built = _build(hooks, context, dtype, bundle.config, bundle.role)
    bundle.chunks, bundle.transformer_config = built.chunks, built.transformer_config
    freeze(bundle)
    if bundle.weights is not None:
        load_model(bundle.weights, hooks.require("ascend_model_family"), bundle.config, bundle)


def require_roles(roles: Sequence[c.RoleSpec], config: RunConfig) -> None:
    """Check the roles of a task.

    Raises:
        HookError: Two roles have one name, one has no step or too many, a model field that the
            config lacks, or settings that contradict each other; lists all.
    """
    names = [role.name for role in roles]
    problems = [] if roles else ["there is none; expected one that trains"]
    if len({*names}) < len(names):
        problems.append(f"expected different names, got {', '.join(names)}")
    for index, role in enumerate(roles):
        steps = [step for step in (role.forward_step, role.frozen_step) if step is not None]
        if len(steps) != min(index, 1):
            wanted = "one of forward_step and frozen_step"
            problems.append(f"{role.name}: expected {wanted if index else 'the step of the task'}")
        if unknown := sorted(role.model.keys() - config.model):
            problems.append(f"{role.name}: [model] has no field {', '.join(unknown)}")
        problems += _contradictions(role, is_first=index == 0)
    if problems:
        raise HookError("ascend_task: the roles cannot be built", problems)


def _contradictions(role: c.RoleSpec, *, is_first: bool) -> Iterator[str]:
    """Yield which settings of a role have no meaning beside its others."""
    for name in ("is_base", "ahead"):
        if not getattr(role, name):
            continue
        if is_first:
            yield f"{role.name}: {name}=True, but the first role trains; expected another role"
        elif role.frozen_step is None:
            yield f"{role.name}: {name}=True is of a frozen model; expected a frozen_step"
    if role.is_base and role.weights is not None:
        yield (
            f"{role.name}: is_base=True takes the weights of the trained model; expected none, got "
            f"weights={role.weights}"
        )
    if role.is_base and role.model:
        yield (
            f"{role.name}: is_base=True has the [model] of the trained model; expected no fields, "
            f"got {', '.join(sorted(role.model))}"
        )


def require_frozen_storage(bundle: c.ModelBundle) -> None:
    """Check that weights that are stored in another form are not trained."""
    for name, parameter in (pair for chunk in bundle.chunks for pair in chunk.named_parameters()):
        if parameter.requires_grad and (stored := stored_weight(parameter)):
            raise HookError(
                f"{name} is stored by '{stored.owner}' in another form, which cannot be trained; "
                "expected an adapter that freezes it"
            )


def match_p2p(config: TransformerConfig) -> None:
    """Make the two stages of an interleaved pipeline match each send with its receive."""
    if config.virtual_pipeline_model_parallel_size and config.pipeline_model_parallel_size == 2:
        # With two ranks, the next and the previous rank are the same. Batched sends and receives
        # are then matched by order only, and Megatron issues them in different orders on the two
        # ranks.
        config.batch_p2p_comm = False


def freeze(bundle: c.ModelBundle) -> None:
    """Set a model to evaluation, without gradients."""
    bundle.frozen = True
    for chunk in bundle.chunks:
        chunk.requires_grad_(False).eval()


def release_graphs(context: c.RunContext) -> None:
    """Drop the graph of the last micro-batch, so that models and process groups can be freed.

    Megatron's token dispatcher holds the router probabilities, which reference the autograd graph
    and, through the gradient-reduction hooks, the dispatcher. Python's garbage collector cannot see
    this reference cycle because it passes through C++.
    """
    for bundle in context.models.values():
        for chunk in bundle.chunks:
            for module in chunk.modules():
                dispatcher = getattr(module, "token_dispatcher", None)
                if dispatcher is not None and hasattr(dispatcher, "probs"):
                    dispatcher.probs = None
