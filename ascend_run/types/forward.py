"""Links of the chain around a module's forward: what plugins return, and how to read a chain.

The kernel composes and installs the chain (``core.model.forward_chain``); nothing else assigns
``module.forward``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import attrs

if TYPE_CHECKING:
    from torch import nn

    from .device import Device

Forward: TypeAlias = Callable[..., Any]
"""The forward of a module."""

CHAIN: Final = "forward_chain"
"""Attribute of a module that holds its chain; set by the kernel, read by ``chain_of``."""


class LinkPlace(enum.StrEnum):
    """Position of a link in the chain of a module."""

    OWN = "own"
    """Replaces the module's own forward, so it is inside all other links: ``wrap`` returns another
    implementation. Several such links are applied in resolved order, and graph boundaries treat
    them as one."""
    AROUND = "around"  #: Wraps the links further in; in resolved order, innermost first.
    COMPILER = "compiler"
    """Wraps each group of adjacent compilable links, the innermost group together with the module's
    own forward. It compiles the group to a graph, or excludes it from the graphs of enclosing
    modules. At most one per module."""


@attrs.frozen(kw_only=True)
class ForwardLink:
    """One link of the chain around a module's forward.

    Args:
        wrap: Maps the inner forward to the outer one: a new function with the same arguments and
            outputs. Called when the chain is composed, and again when a link is added or removed
            later, so it must have no side effects. Raises ValueError if it cannot wrap this one.
        compilable: Whether torch.compile may trace the outer forward. If not, there is a graph
            break at the link.
    """

    wrap: Callable[[Forward], Forward]
    compilable: bool


class Keeping(enum.StrEnum):
    """What is kept of the activations of a part of a layer until its backward."""

    RECOMPUTE = "recomputed"  #: The part's input.
    DISCARD = "discarded"  #: The part's input; its output is freed once it has been read.
    OFFLOAD = "offloaded"  #: Everything, in other memory.


@attrs.frozen
class ActivationTreatment:
    """What a plugin does with the activations of one part of a layer."""

    keeping: Keeping  #: What is kept.
    links: Callable[[Any, Sequence[str], Device], Mapping[str, ForwardLink]] | None = None
    """Maps a layer, its parts that have these ``links`` and the device to links by module, around
    all other links. None: the plugin does it by other hooks, and counts it in ``ascend_cost``."""


@attrs.frozen(kw_only=True)
class NamedLink:
    """A link in a chain, with the name of the plugin (or tool) that added it."""

    name: str  #: Of the plugin or tool.
    place: LinkPlace  #: Its position.
    link: ForwardLink  #: What it added.


@attrs.frozen(eq=False)
class ForwardChain:
    """The links of one module, innermost first, around its original forward."""

    own: Forward  #: The module's original forward.
    links: tuple[NamedLink, ...] = ()  #: Innermost first.

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the links, innermost first."""
        return tuple(named.name for named in self.links)

    @property
    def compilable(self) -> bool:
        """Whether torch.compile may trace the whole chain."""
        return all(named.link.compilable for named in self.links)

    def __reduce__(self) -> NoReturn:
        # The links close over this module: a copy would compute with the original's weights.
        raise TypeError(
            "a module with links around its forward can be neither copied nor pickled (links: "
            f"{', '.join(self.names)}); build a new module and load this one's state_dict into it"
        )


def chain_of(module: nn.Module) -> ForwardChain:
    """Return the chain around a module's forward; one without links if none is installed."""
    chain: ForwardChain | None = getattr(module, CHAIN, None)
    return ForwardChain(module.forward) if chain is None else chain
