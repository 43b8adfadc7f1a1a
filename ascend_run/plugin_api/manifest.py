"""The manifest of a plugin: declarations that are read before any of its code runs. Torch-free."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any, Protocol, Self

import attrs

from ascend_run.types.attention import AttentionFeatures
from ascend_run.types.condition import Condition
from ascend_run.types.config import DEFAULT_PLATFORM
from ascend_run.types.forward import LinkPlace

from .errors import UnknownFields
from .legacy_flags import LegacyFlag
from .version import API_VERSION, in_api_range


class Claim(enum.StrEnum):
    """The parts of a run that only one plugin may own.

    Implementing a provider hook implies its claim (see the hook's specification), which must not be
    repeated in the manifest. Claims without a provider hook are declared in the manifest:
    ``saved-activations`` for plugins that move or drop saved activations, ``dataset`` for tasks
    whose samples are not Megatron token files, and ``token-dispatcher``, ``linear-comm``,
    ``activation-policy``, ``parameter-storage``, ``schedule`` and ``checkpoint-store`` for plugins
    that own such a part through a wrapper hook. Two enabled plugins with the same claim are an
    error.
    """

    ATTENTION_KERNEL = "attention-kernel"  #: Attention on one device.
    POSITION_BIAS = "position-bias"  #: A bias by distance.
    CONTEXT_PARALLEL = "context-parallel"  #: How a sequence is sharded, and its exchange.
    EXPERTS = "experts"  #: MLPs of the experts.
    TOKEN_DISPATCHER = "token-dispatcher"
    """First: ``moe-alltoall-opt``."""
    ROUTER = "router"  #: Selection of experts.
    LINEAR_COMM = "linear-comm"  #: Collectives of parallel linears.
    ACTIVATION_POLICY = "activation-policy"
    """First: ``recompute-in-bubble``."""
    SAVED_ACTIVATIONS = "saved-activations"  #: Where they are kept until backward.
    PARAMETER_STORAGE = "parameter-storage"
    """First: ``reuse-fp32-param``."""
    DATA_PARALLEL = "data-parallel"  #: Gradient reduction.
    OPTIMIZER = "optimizer"  #: The update of the weights.
    SCHEDULE = "schedule"
    """First: ``dualpipev``."""
    CHECKPOINT_STORE = "checkpoint-store"
    """First: ``async-save``."""
    DATASET = "dataset"  #: The source of the samples.
    TASK = "task"  #: What is trained.
    MODEL_FAMILY = "model-family"  #: Keys and tensors of a model.
    PLATFORM = "platform"  #: The device.
    PLATFORM_OPS = "platform-ops"  #: Fused operators.
    NORM = "norm"  #: The model's norm layers.


class Numerics(enum.StrEnum):
    """How enabling a plugin may change the numerical results of a run."""

    BITWISE = "bitwise"
    """Not at all: results are bitwise equal."""
    ROUNDING = "rounding"
    """By rounding only, such as a different reduction order."""
    MODEL = "model"
    """By design: it changes the model."""


class Maturity(enum.StrEnum):
    """How mature a plugin is."""

    STABLE = "stable"  #: Complete, and not expected to change.
    BETA = "beta"  #: Complete; its options may change.
    EXPERIMENTAL = "experimental"  #: It may change in any way.


class Support(enum.StrEnum):
    """How well a plugin is verified on a platform."""

    REAL = "real"
    """Its tests pass on that device."""
    EMULATED = "emulated"
    """Its tests pass there, with an emulation of its target: for example copies to the host,
    although device and host share one memory."""
    ARITHMETIC = "arithmetic"
    """Not run on the device. Every operator call matches the schema of the device library, and
    with reference kernels for these operators the same code matches the CPU, on several ranks."""
    SCHEMA = "schema"
    """Not run on the device. Operator calls match the schemas; results are not checked."""
    UNVERIFIED = "unverified"
    """Written for that platform, without verification."""
    REFUSED = "refused"
    """Not supported."""


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
    summary: str
    """One line."""
    aliases: tuple[str, ...] = ()
    """Other names; each has its own entry point to the same class."""
    claims: tuple[Claim, ...] = ()
    """Claims in addition to those implied by its provider hooks."""
    requires: tuple[str | Condition, ...] = ()
    """Plugins that must be enabled too, or conditions on the config."""
    conflicts: Mapping[str, str] = attrs.field(factory=dict)
    """Plugin that it cannot run with -> the reason and what to do instead."""
    after: tuple[str, ...] = ()
    """Plugins that it wraps: they are applied first, so they are further in."""
    inside: tuple[Claim, ...] = ()
    """Seams whose owner wraps it, whichever plugin that is; without an owner there is no order."""
    outside: tuple[Claim, ...] = ()
    """Seams whose owner it wraps."""
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
    them unless the user sets them; config keys only with their own models."""
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
    level: int = attrs.field(default=2, validator=attrs.validators.in_((0, 1, 2)))
    """The bundle ``--level N`` that it belongs to."""
    maturity: Maturity = Maturity.EXPERIMENTAL  #: How mature it is.
    legacy_flags: tuple[LegacyFlag, ...] = ()
    """Flags of Megatron and MindSpeed that this plugin replaces."""
    source: str = ""
    """Paper, or file of a public project, that describes the algorithm."""
    requires_api: str = attrs.field(default=f"=={API_VERSION}", validator=_api_range)
    """The API versions that it was written for, such as ``>=0,<2``."""
