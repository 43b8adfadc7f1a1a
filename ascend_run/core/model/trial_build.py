"""What Megatron itself refuses of a model, found without ranks and without memory.

Its TransformerConfig is made as training makes it, and one layer of each kind is built from
tensors that have shapes and no content. No process group stands: sizes of groups come from the
layout, and Megatron's own modules, which see none, take their undivided shapes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

from ascend_run.core.config.layout import layout_of
from ascend_run.core.hooks import Hooks
from ascend_run.core.patches import applied_patches
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.errors import AscendRunError, ConfigError
from ascend_run.plugin_api.layout import Layout

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
    """A process group of which only the sizes are known: this is its first rank."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def trial_build(config: RunConfig, plugins: Sequence[Any], world_size: int) -> int:
    """Build what Megatron checks.

    Args:
        plugins: Instances in resolved order, innermost first.

    Returns:
        How many kinds of layer were built.

    Raises:
        ConfigError: Megatron, or a plugin at its seams, refuses the model; one message.
        PlatformError: The platform is not on this machine.
    """
    hooks = Hooks(plugins)
    layout = layout_of(config, world_size)
    with warnings.catch_warnings():
        # Megatron warns of each optional library that it does without; none is needed here.
        warnings.simplefilter("ignore")
        device = hooks.require("ascend_device", local_rank=0)
        device.activate()
        try:
            with applied_patches(hooks):
                return _build(config, hooks, layout, device)
        except AscendRunError:
            raise
        except (AssertionError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            reason = str(error) or type(error).__name__
            raise ConfigError("Megatron refuses this model", [reason]) from error
        finally:
            device.deactivate()


def _build(config: RunConfig, hooks: Hooks, layout: Layout, device: Any) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from .build import assemble
    from .transformer_config import PRECISIONS, make_transformer_config

    groups = _groups(config, layout, hooks)
    asked = {"device": device, "groups": groups, "role": "policy"}
    dtype = PRECISIONS[config.train.precision]
    transformer_config = make_transformer_config(config, hooks, dtype, **asked)
    assembly = assemble(config, hooks, **asked)
    transformer_config.perform_initialization = False  # there is nothing to draw into
    kinds = _places_of_each_kind(transformer_config, assembly)
    with FakeTensorMode():
        for place in kinds:
            _layer(transformer_config, assembly, place)
    if assembly.attention_problems:
        headline = "the attention cannot do what this run asks"
        raise ConfigError(headline, list(assembly.attention_problems))
    return len(kinds)


def _places_of_each_kind(transformer_config: Any, assembly: Any) -> list[int]:
    """The first layer of those without experts, and the first of those with."""
    from .spec import moe_layers

    kinds: dict[bool, int] = {}
    for place, moe in enumerate(moe_layers(transformer_config)):
        if assembly.layer_numbers[place] is not None:
            kinds.setdefault(moe, place)
    return list(kinds.values())


def _layer(transformer_config: Any, assembly: Any, place: int) -> None:
    from megatron.core.transformer.spec_utils import build_module

    from .spec import layer_spec, moe_layers

    spec = layer_spec(transformer_config, assembly, moe=moe_layers(transformer_config)[place])
    build_module(
        spec, config=transformer_config, layer_number=place + 1, pg_collection=assembly.groups
    )


def _groups(config: RunConfig, layout: Layout, hooks: Hooks) -> Any:
    """What stands where Megatron's ProcessGroupCollection will."""
    sizes = {name: len(layout.groups(*axes)[0]) for name, axes in _GROUPS.items()}
    own = hooks.merge("ascend_process_groups", config=config, layout=layout)
    sizes |= {name: len(lists[0]) for name, lists in own.items()}
    return SimpleNamespace(**{name: PlannedGroup(size) for name, size in sizes.items()})
