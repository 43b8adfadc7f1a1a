"""The manifest of a plugin: declarations that are read before any of its code runs. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol, Self

import attrs

from ascend_run.types.api_version import API_VERSION, in_api_range
from ascend_run.types.attention import AttentionFeatures
from ascend_run.types.condition import Condition
from ascend_run.types.config import DEFAULT_PLATFORM
from ascend_run.types.declarations import Claim, Maturity, Numerics, Support
from ascend_run.types.forward import LinkPlace

from .errors import UnknownFields
from .legacy_flags import LegacyFlag


class EnabledPlugin(Protocol):
    """A plugin of a run; what it does is in its implementations of hooks."""

    @property
    def manifest(self) -> Manifest: ...


def _kebab_case(instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", value):
        raise ValueError(f"{attribute.name} {value!r} must be kebab-case, such as 'my-feature'")


def _api_range(instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
    in_api_range(value)


@attrs.frozen(kw_only=True)
class Manifest:
    """A plugin's declaration: all that resolution and ``plan`` know about it.

    Raises:
        UnknownFields: An argument is not a field.
    """

    def __new__(cls, **fields: Any) -> Self:
        known = {field.name for field in attrs.fields(cls)}
        if unknown := fields.keys() - known:
            raise UnknownFields(unknown, known)
        return object.__new__(cls)

    name: str = attrs.field(validator=_kebab_case)
    """The name to pass to ``--enable``; for a model family, the Hugging Face ``model_type``."""
    summary: str  #: One line.
    aliases: tuple[str, ...] = ()  #: Other names; each has its own entry point to the same class.
    claims: tuple[Claim, ...] = ()  #: Claims in addition to those implied by its provider hooks.
    requires: tuple[str | Condition, ...] = ()
    """Plugins that must be enabled too, or conditions on the config."""
    conflicts: Mapping[str, str] = attrs.field(factory=dict)
    """Plugin that it cannot run with -> the reason and what to do instead."""
    after: tuple[str, ...] = ()
    """Plugins that it wraps: they are applied first, so they are further in."""
    inside: tuple[Claim, ...] = ()
    """Seams whose owner wraps it, whichever plugin that is; without an owner there is no order."""
    outside: tuple[Claim, ...] = ()  #: Seams whose owner it wraps.
    forward_links: Mapping[str, LinkPlace] = attrs.field(factory=dict)
    """Kind of module whose forward it wraps -> position in the chain of such a module: ``layer``,
    ``self_attention``, ``mlp``, ``moe_layer``, ``linear`` (of a layer), ``embedding``,
    ``output_layer``, ``model``, or Megatron's name of a submodule of a layer
    (``input_layernorm``). Links that are not declared are an error."""
    idle: Condition | None = None
    """Under this condition the plugin has no effect and its hooks may return None."""
    small_model_settings: Mapping[str, object] = attrs.field(factory=dict)
    """Settings under which a model of a few thousand parameters exercises the plugin: options
    (``min_bytes``), or config keys (``model.window_size``). ``verify`` and the conformance kit use
    them unless the user sets them; keys (except ``optimizer.lr``) only with their own models."""
    exercised_by: str = ""
    """What makes the plugin act in a run in which it had no effect, as part of a sentence: for the
    message of ``verify``."""
    numerics: Numerics = Numerics.BITWISE  #: How it may change results.
    platforms: Mapping[str, Support] = attrs.field(factory=lambda: {DEFAULT_PLATFORM: Support.REAL})
    """Platform -> how well it is verified there; other platforms are not supported."""
    behaves_as: str = ""
    """For a platform: another platform that it is compatible with, so that plugins for that one run
    on it too (``cuda`` for a device behind ``torch.cuda``). A plugin's entry for this platform
    takes precedence."""
    attention: AttentionFeatures | None = None
    """Features of its attention kernel; for a wrapping kernel, those that it passes through. If
    None, the kernel's ``features`` are checked only when it is built on the ranks."""
    attention_needs: AttentionFeatures = attrs.field(factory=AttentionFeatures)
    """Features that it needs of the attention kernel: ``bias`` if it adds a bias."""
    level: int = attrs.field(default=2, validator=attrs.validators.in_((0, 1, 2, 3)))
    """The bundle ``--level N`` that it belongs to; 3 for none: enabled by name only."""
    maturity: Maturity = Maturity.EXPERIMENTAL  #: How mature it is.
    legacy_flags: tuple[LegacyFlag, ...] = ()
    """Flags of Megatron and MindSpeed that this plugin replaces."""
    source: str = ""  #: Paper, or file of a public project, that describes the algorithm.
    requires_api: str = attrs.field(default=f"=={API_VERSION}", validator=_api_range)
    """The API versions that it was written for, such as ``>=0,<2``."""
