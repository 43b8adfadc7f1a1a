"""Plugins around the forward of modules: a hook, and a reason to return what the module returned.

They are made from a table, as classes of this module, so that entry points can name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from ascend_run.plugin_api import ForwardLink, LinkPlace, Numerics, hookimpl

from .idle import Idle, manifest

Forward = Callable[..., Any]


@attrs.frozen(kw_only=True)
class Options:
    """Options of each of these plugins, with values under which it does nothing."""

    strength: float = 0.0
    threshold: float = 1e6
    first_step: int = 1000
    longer_than: int = 4096
    layer: int = 90


class Changes:
    """Base: changes the output of modules with ``change``."""

    config_class = Options

    def __init__(self, config: Options) -> None:
        self.config = config
        self.step = self.calls = 0

    def change(self, output: Any) -> Any:
        """
        Args:
            output: The first tensor that a module returned.
        """
        raise NotImplementedError

    def wrap(self, module: Any) -> ForwardLink:
        def around(inner: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                output = inner(*args, **kwargs)
                if isinstance(output, tuple):
                    return (self.change(output[0]), *output[1:])
                return self.change(output)

            return forward

        return ForwardLink(wrap=around, compilable=False)


def returns_its_output(plugin: Changes, output: Any) -> Any:
    return output


def counts_calls(plugin: Changes, output: Any) -> Any:
    plugin.calls += 1
    return output


def threshold_too_high(plugin: Changes, output: Any) -> Any:
    most = plugin.config.threshold
    return output.clamp(-most, most) if bool((output.abs() > most).any()) else output


def clamps_nothing(plugin: Changes, output: Any) -> Any:
    return output.clamp(-plugin.config.threshold, plugin.config.threshold)


def option_off(plugin: Changes, output: Any) -> Any:
    strength = plugin.config.strength
    return output + strength * output.tanh() if strength else output


def option_of_zero(plugin: Changes, output: Any) -> Any:
    """Computes, and multiplies what it computed by zero."""
    return output + plugin.config.strength * output.tanh()


def scales_by_one(plugin: Changes, output: Any) -> Any:
    return output * 1.0


def copies_in_shape(plugin: Changes, output: Any) -> Any:
    return output.reshape(-1).view(output.shape).clone()


def checks_only(plugin: Changes, output: Any) -> Any:
    assert bool(output.isfinite().all())
    return output


def starts_later(plugin: Changes, output: Any) -> Any:
    return output * 0.5 if plugin.step >= plugin.config.first_step else output


def in_evaluation_only(plugin: Changes, output: Any) -> Any:
    import torch

    return output if torch.is_grad_enabled() else output * 0.5


def in_half_precision_only(plugin: Changes, output: Any) -> Any:
    return output * 0.5 if output.element_size() == 2 else output


def on_another_device_only(plugin: Changes, output: Any) -> Any:
    return output * 0.5 if output.device.type == "npu" else output


def in_long_sequences_only(plugin: Changes, output: Any) -> Any:
    return output * 0.5 if output.shape[0] > plugin.config.longer_than else output


Reason = Callable[[Changes, Any], Any]
CASES: Final[tuple[tuple[str, Reason], ...]] = (
    ("layer", returns_its_output),
    ("layer", in_long_sequences_only),
    ("layer", copies_in_shape),
    ("self_attention", threshold_too_high),
    ("self_attention", option_off),
    ("mlp", scales_by_one),
    ("mlp", starts_later),
    ("moe_layer", in_evaluation_only),
    ("moe_layer", option_of_zero),
    ("linear", clamps_nothing),
    ("linear", in_half_precision_only),
    ("embedding", on_another_device_only),
    ("output_layer", counts_calls),
    ("model", checks_only),
)
"""Hook and reason. Every reason once, and every hook that wraps a module."""
_WITH_EXPERTS: Final = ("moe_layer",)
_UNFUSES: Final = ("output_layer",)
"""The loss is fused with an output layer that no plugin wraps."""


def _made(hook: str, reason: Reason) -> type[Any]:
    def wraps(self: Changes) -> Callable[[Any], ForwardLink]:
        return self.wrap

    def counts_steps(self: Changes) -> None:
        self.step += 1

    words = f"{hook}_{reason.__name__}".split("_")
    members: Mapping[str, Any] = {
        "__module__": __name__,
        "__doc__": reason.__doc__,
        "manifest": manifest(
            "-".join(words),
            numerics=Numerics.ROUNDING if hook in _UNFUSES else Numerics.BITWISE,
            forward_links={hook: LinkPlace.AROUND},
        ),
        "change": reason,
        f"ascend_{hook}": hookimpl(wraps),
        "ascend_after_step": hookimpl(counts_steps),
    }
    return type("".join(map(str.title, words)), (Changes,), dict(members))


class MatchesNoLayer(Changes):
    """Its layer is none of the model's."""

    manifest = manifest("matches-no-layer", forward_links={"layer": LinkPlace.AROUND})

    @hookimpl
    def ascend_layer(self, layer_index: int) -> Callable[[Any], ForwardLink] | None:
        return self.wrap if layer_index == self.config.layer else None


class MatchesNoLinear(Changes):
    """The linears that it names are of another family."""

    manifest = manifest("matches-no-linear", forward_links={"linear": LinkPlace.AROUND})

    @hookimpl
    def ascend_linear(self, name: str) -> Callable[[Any], ForwardLink] | None:
        return self.wrap if name in ("self_attn.q_proj", "self_attn.v_proj") else None


class HoldsSavedTensors:
    """Its saved-tensor hooks return what they are given."""

    manifest = manifest("holds-saved-tensors", forward_links={"layer": LinkPlace.AROUND})

    @hookimpl
    def ascend_layer(self) -> Callable[[Any], ForwardLink]:
        from torch.autograd.graph import saved_tensors_hooks

        def around(inner: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                with saved_tensors_hooks(lambda x: x, lambda x: x):
                    return inner(*args, **kwargs)

            return forward

        return lambda layer: ForwardLink(wrap=around, compilable=False)


_CLASSES: Final = {made.__name__: made for made in (_made(*case) for case in CASES)}
globals().update(_CLASSES)

PLUGINS: Final = (
    *(
        Idle(plugin=made, model="moe" if hook in _WITH_EXPERTS else None)
        for (hook, _), made in zip(CASES, _CLASSES.values(), strict=True)
    ),
    *(Idle(plugin=plugin) for plugin in (MatchesNoLayer, MatchesNoLinear, HoldsSavedTensors)),
)
