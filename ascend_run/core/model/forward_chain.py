"""Chains of named links around ``module.forward``; the only module that assigns it.

A chain is composed to nested functions, so a call does not iterate over links. The module stays the
same object with the same parameters, so its ``state_dict`` and hooks are unaffected.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from types import FunctionType

import torch
from torch import nn

from ascend_run.plugin_api.errors import HookError
from ascend_run.types.forward import CHAIN, Forward, ForwardChain, LinkPlace, NamedLink, chain_of


def in_order(links: Sequence[NamedLink], order: Sequence[str]) -> list[NamedLink]:
    """Order links innermost first: replacements, then wrappers, each in plugin order."""
    return sorted(links, key=lambda x: (x.place is not LinkPlace.OWN, order.index(x.name)))


def install(model: nn.Module, links: Mapping[nn.Module, Sequence[NamedLink]]) -> None:
    """Install chains on modules of a model, submodules before their parents.

    Args:
        links: Maps each module to its links, ordered by ``in_order``.

    Raises:
        HookError: Two links of a module have the same name or are compilers, or a link returns
            something that is not callable.
    """
    compiles = any(named.place is LinkPlace.COMPILER for each in links.values() for named in each)
    inner_first = {module: at for at, module in enumerate(reversed([*model.modules()]))}
    for module in sorted(links, key=lambda module: inner_first.get(module, -1)):
        _set(module, ForwardChain(chain_of(module).own, tuple(links[module])), breaks=compiles)


@contextmanager
def linked(links: Mapping[nn.Module, NamedLink]) -> Iterator[None]:
    """Add a link around all others of each module, within the context.

    Raises:
        HookError: See ``install``.
    """
    try:
        for module, named in links.items():
            chain = chain_of(module)
            _set(module, ForwardChain(chain.own, (*chain.links, named)), breaks=True)
        yield
    finally:
        for module, named in links.items():
            remove(module, named.name)


def remove(module: nn.Module, name: str) -> None:
    """Remove one link from a module's chain, wherever it is; a missing link is not an error."""
    chain = chain_of(module)
    rest = tuple(named for named in chain.links if named.name != name)
    if len(rest) < len(chain.links):
        _set(module, ForwardChain(chain.own, rest), breaks=True)


def _set(module: nn.Module, chain: ForwardChain, *, breaks: bool) -> None:
    """Compose and install a chain.

    With ``breaks``, torch.compile may trace the module, so links that are not compilable must break
    the graph.
    """
    if chain.links:
        _check(module, chain)
        forward = _composed(chain, breaks=breaks)
        if isinstance(forward, FunctionType | partial):
            forward.__dict__["__signature__"] = inspect.signature(chain.own)
        setattr(module, CHAIN, chain)  # set first: it explains pickling errors
        module.forward = forward
        return
    delattr(module, CHAIN)
    del module.forward
    if module.forward != chain.own:  # the instance had its own forward attribute before
        module.forward = chain.own


def _check(module: nn.Module, chain: ForwardChain) -> None:
    where = f"forward of a {type(module).__name__}"
    if twice := sorted({name for name in chain.names if chain.names.count(name) > 1}):
        raise HookError(f"{where}: {', '.join(map(repr, twice))} links it twice; link it once")
    compilers = [named.name for named in chain.links if named.place is LinkPlace.COMPILER]
    if len(compilers) > 1:
        raise HookError(f"{where}: {' and '.join(map(repr, compilers))} compile it; enable one")


def _composed(chain: ForwardChain, *, breaks: bool) -> Forward:
    """Compose the outermost forward; each run of compilable links is wrapped by the compiler."""
    at: dict[LinkPlace, list[NamedLink]] = {place: [] for place in LinkPlace}
    for named in chain.links:
        at[named.place].append(named)
    runs = groupby(
        [at[LinkPlace.OWN], *([named] for named in at[LinkPlace.AROUND])],
        key=lambda together: all(named.link.compilable for named in together),
    )
    forward = chain.own
    for compilable, run in runs:
        for named in (named for together in run for named in together):
            forward = wrap_forward(named, forward)
        if compilable:
            for compiler in at[LinkPlace.COMPILER]:
                forward = wrap_forward(compiler, forward)
        elif breaks:
            forward = torch.compiler.disable(forward)
    return forward


def wrap_forward(named: NamedLink, forward: Forward) -> Forward:
    """Return the forward with one link around it.

    Raises:
        HookError: The link cannot wrap this forward, or returns something that is not callable.
    """
    try:
        outer = named.link.wrap(forward)
    except ValueError as error:
        raise HookError(f"'{named.name}' cannot link a forward: {error}") from error
    if not callable(outer):
        raise HookError(
            f"'{named.name}' wraps a forward in {outer!r}; expected a function with its arguments"
        )
    return outer
