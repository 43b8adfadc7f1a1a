"""Let Megatron validate a model, without ranks and without memory.

The TransformerConfig is built as in training, and one layer of each kind is built on fake tensors.
There are no process groups: their sizes come from the layout, and Megatron's own modules, which see
no group, are built unsharded.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from ascend_run.core.config.layout import layout_of
from ascend_run.core.hooks import Hooks
from ascend_run.core.log.setup import configure_logging
from ascend_run.core.patches import applied_patches
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ascend_run.core.model.assembly import Assembly
    from ascend_run.plugin_api.manifest import EnabledPlugin
    from ascend_run.types.device import Device

_GROUPS: Final = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "ep": ("ep",),
    "expt_tp": ("expt_tp",),
    "tp_ep": ("expt_tp", "ep"),
    "tp_ep_pp": ("expt_tp", "ep", "pp"),
    "expt_dp": ("expt_dp",),
}
"""Megatron's name of a group -> our axes."""


class PlannedGroup:
    """A placeholder for a process group of the given size, on its rank 0."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def trial_build(config: RunConfig, plugins: Sequence[EnabledPlugin], world_size: int) -> int:
    """Build the model's config and one layer of each kind.

    Args:
        plugins: Instances in resolved order, innermost first.

    Returns:
        Number of layers built.

    Raises:
        ConfigError: Megatron or a plugin rejects the model.
        PlatformError: The platform is not available on this machine.
    """
    hooks = Hooks(plugins)
    layout = layout_of(config, world_size)
    # The log of a run is on the console, and stdout has the plan.
    with configure_logging(None, level="warning"), warnings.catch_warnings():
        # Megatron warns of each missing optional library; none is needed here.
        warnings.simplefilter("ignore")
        device = hooks.require("ascend_device", local_rank=0)
        device.activate()
        try:
            with applied_patches(hooks):
                return _build(config, hooks, layout, device)
        except Exception as error:
            if not _is_of_megatron(error):
                raise
            reason = str(error) or type(error).__name__
            raise ConfigError("Megatron rejects this model", [reason]) from error
        finally:
            device.deactivate()


def _is_of_megatron(error: Exception) -> bool:
    """Return whether Megatron raised an error, itself or by a call of torch or Python."""
    names = (
        str(frame.f_globals.get("__name__")).partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    callers = [name for name in names if name != "torch" and name not in sys.stdlib_module_names]
    return callers[-1] == "megatron"


def _build(config: RunConfig, hooks: Hooks, layout: Layout, device: Device) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ascend_run.core.model.build import assemble
    from ascend_run.core.model.transformer_config import PRECISIONS, make_transformer_config

    groups = _groups(config, layout, hooks)
    arguments: dict[str, Any] = {"device": device, "groups": groups, "role": "policy"}
    dtype = PRECISIONS[config.train.precision]
    transformer_config = make_transformer_config(config, hooks, dtype, **arguments)
    assembly = assemble(config, hooks, **arguments)
    transformer_config.perform_initialization = False  # fake tensors have no content
    kinds = _first_slots(transformer_config, assembly)
    with FakeTensorMode(), _first_pipeline_rank():
        for slot in kinds:
            _layer(transformer_config, assembly, slot)
    if assembly.attention_problems:
        headline = "the attention kernel does not support this run"
        raise ConfigError(headline, list(assembly.attention_problems))
    return len(kinds)


@contextmanager
def _first_pipeline_rank() -> Iterator[None]:
    """Set Megatron's pipeline rank to 0: with ``pipeline_model_parallel_layout`` it reads its
    global state instead of the groups that are passed."""
    from megatron.core.parallel_state import set_pipeline_model_parallel_rank

    set_pipeline_model_parallel_rank(0)
    try:
        yield
    finally:
        set_pipeline_model_parallel_rank(None)


def _first_slots(transformer_config: TransformerConfig, assembly: Assembly) -> list[int]:
    """Slots of the first layer without experts and the first one with experts."""
    experts = moe_layers(transformer_config)
    kinds: dict[bool, int] = {}
    for slot, number in enumerate(assembly.layer_numbers):
        if number is not None:
            kinds.setdefault(slot in experts, slot)
    return list(kinds.values())


def _layer(transformer_config: TransformerConfig, assembly: Assembly, slot: int) -> None:
    from megatron.core.transformer.spec_utils import build_module

    from ascend_run.core.model.spec import layer_spec

    spec = layer_spec(transformer_config, assembly, moe=slot in moe_layers(transformer_config))
    num_chunks = transformer_config.virtual_pipeline_model_parallel_size
    build_module(
        spec,
        config=transformer_config,
        layer_number=slot + 1,
        pg_collection=assembly.groups,
        vp_stage=None if num_chunks is None else 0,
    )


def _groups(config: RunConfig, layout: Layout, hooks: Hooks) -> ProcessGroupCollection:
    """A placeholder for Megatron's ProcessGroupCollection."""
    sizes = {name: len(layout.groups(*axes)[0]) for name, axes in _GROUPS.items()}
    own = hooks.merge("ascend_process_groups", config=config, layout=layout)
    sizes |= {name: len(lists[0]) for name, lists in own.items()}
    planned = SimpleNamespace(**{name: PlannedGroup(size) for name, size in sizes.items()})
    return cast("ProcessGroupCollection", planned)
