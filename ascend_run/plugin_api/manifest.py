"""What a plugin says of itself before any of its code runs: data, read without torch."""

from __future__ import annotations

import enum
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from .config import DEFAULT_PLATFORM
from .contracts.attention import AttentionFeatures
from .version import API_VERSION


class Claim(enum.StrEnum):
    """The seams that only one plugin of a run may own.

    Whoever implements a provider hook must claim its seam (the hook's specification says which);
    ``saved-activations`` is claimed by what moves or drops the tensors that a layer keeps for
    backward. Reserved, with no hook of their own yet: ``token-dispatcher``, ``linear-comm``,
    ``activation-policy``, ``parameter-storage`` and ``schedule``. Claim them all the same where a
    plugin owns such a seam by way of a wrapper: two that do are then refused.
    """

    ATTENTION_KERNEL = "attention-kernel"
    POSITION_BIAS = "position-bias"
    SEQUENCE_EXCHANGE = "sequence-exchange"
    EXPERTS = "experts"
    TOKEN_DISPATCHER = "token-dispatcher"
    ROUTER = "router"
    LINEAR_COMM = "linear-comm"
    LOSS = "loss"
    ACTIVATION_POLICY = "activation-policy"
    SAVED_ACTIVATIONS = "saved-activations"
    PARAMETER_STORAGE = "parameter-storage"
    DATA_PARALLEL = "data-parallel"
    OPTIMIZER = "optimizer"
    SCHEDULE = "schedule"
    CHECKPOINT_STORE = "checkpoint-store"
    DATASET = "dataset"
    TASK = "task"
    MODEL_FAMILY = "model-family"
    PLATFORM = "platform"
    PLATFORM_OPS = "platform-ops"
    NORM = "norm"


class Numerics(enum.StrEnum):
    """What enabling a plugin may change in the numbers of a run."""

    BITWISE = "bitwise"
    """Nothing: every bit stays."""
    ROUNDING = "rounding"
    """Only the order in which floating-point sums are taken."""
    MODEL = "model"
    """The result, by design."""


class Maturity(enum.StrEnum):
    """How far a plugin can be trusted."""

    STABLE = "stable"
    BETA = "beta"
    EXPERIMENTAL = "experimental"


class Support(enum.StrEnum):
    """How a plugin runs on one platform, and how that is known."""

    REAL = "real"
    """Its suite has run on that device."""
    EMULATED = "emulated"
    """Its suite has run there, on a stand-in of what it is for: a copy to the host, where device
    and host are one memory."""
    ARITHMETIC = "arithmetic"
    """The device has not been seen. Every operator of it that is called is taken by the device
    library's own schema, and over reference kernels of these operators, on ranks, the very code
    computes what it computes on the CPU."""
    SCHEMA = "schema"
    """The same without the arithmetic: calls are taken by the schema, and that is all."""
    UNVERIFIED = "unverified"
    """It is written for that platform, and nothing has been shown."""
    REFUSED = "refused"
    """It cannot run there."""


_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}


@attrs.frozen
class Condition:
    """A comparison of one config value with a constant, such as ``num_moe_experts > 0``.

    Args:
        field: A config key, ``section.name`` (``model.num_moe_experts``).
        comparison: One of ``> >= < <= == !=``; a missing value (None) compares as 0.
        value: The constant on the right.
        why: Why the plugin asks for it, for the message.
        fix: What the user can do, for the message.
    """

    field: str
    comparison: str = attrs.field(validator=attrs.validators.in_(_OPERATORS))
    value: int | float | str | bool
    why: str = ""
    fix: str = ""

    @classmethod
    def one_rank(cls, size: str, why: str) -> Condition:
        """That an axis of parallelism has one rank, where whatever goes over it is idle.

        Args:
            size: A key of ``parallel``, such as ``context_parallel_size``.
        """
        return cls(f"parallel.{size}", "<=", 1, why=why, fix=f"set parallel.{size}")

    def holds(self, config: Any) -> bool:
        """Whether the condition is true of a RunConfig."""
        section, _, name = self.field.partition(".")
        seen = getattr(getattr(config, section), name)
        return _OPERATORS[self.comparison](0 if seen is None else seen, self.value)

    def __str__(self) -> str:
        return f"{self.field} {self.comparison} {self.value}"


def _kebab_case(instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", value):
        raise ValueError(f"{attribute.name} {value!r} must be kebab-case, such as 'my-feature'")


@attrs.frozen(kw_only=True)
class Manifest:
    """A plugin's declaration. Everything that resolution and ``plan`` know about it."""

    name: str = attrs.field(validator=_kebab_case)
    """The word after ``--enable``; for a model family, the Hugging Face ``model_type``."""
    summary: str
    """One line."""
    aliases: tuple[str, ...] = ()
    """Other names; each has its own entry-point line to the same class."""
    claims: tuple[Claim, ...] = ()
    """Seams that this plugin owns alone."""
    requires: tuple[str | Condition, ...] = ()
    """Plugins that must be enabled too, or conditions on the run."""
    conflicts: Mapping[str, str] = attrs.field(factory=dict)
    """Plugin that it cannot run beside -> the reason and the way out."""
    after: tuple[str, ...] = ()
    """Plugins that it wraps: they are applied first, so they are further in."""
    idle: Condition | None = None
    """When this holds the plugin changes nothing and its hooks may answer None."""
    numerics: Numerics = Numerics.BITWISE
    platforms: Mapping[str, Support] = attrs.field(factory=lambda: {DEFAULT_PLATFORM: Support.REAL})
    """Platform -> how it runs there; a platform that is not named is refused."""
    behaves_as: str = ""
    """Of a platform: another whose plugins run on it as well, since it answers as that one does (a
    device behind ``torch.cuda``: ``cuda``). What a plugin says of this platform goes first."""
    attention: AttentionFeatures | None = None
    """What its attention kernel can do; of one that wraps another, what it lets through. None says
    nothing, and then a kernel's ``features`` are seen only once it is built on the ranks."""
    attention_needs: AttentionFeatures = attrs.field(factory=AttentionFeatures)
    """What it asks of the attention kernel inside of it: ``bias`` for a bias that it adds."""
    level: int = attrs.field(default=2, validator=attrs.validators.in_((0, 1, 2)))
    """The bundle ``--level N`` that it belongs to."""
    maturity: Maturity = Maturity.EXPERIMENTAL
    legacy_flags: tuple[str, ...] = ()
    """Flags of the reference systems that it answers to."""
    source: str = ""
    """Paper, or file of a public project, that the algorithm comes from."""
    api_version: int = API_VERSION
    """The API it was written for."""
