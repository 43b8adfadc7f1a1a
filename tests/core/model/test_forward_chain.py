"""Chains of links around a module's forward: order, graphs, undoing, and what does not see them."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from ascend_run.core.model.forward_chain import in_order, install, linked, remove
from ascend_run.plugin_api import ForwardLink, HookError, LinkPlace
from ascend_run.types.forward import Forward, NamedLink, chain_of
from tests.support.marking import marking_link

OWN, AROUND, COMPILER = LinkPlace.OWN, LinkPlace.AROUND, LinkPlace.COMPILER


class Block(nn.Module):
    """[.., 4] -> [.., 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return torch.sin(self.linear(x)) * scale


def named(
    name: str,
    wrap: Callable[[Forward], Forward],
    *,
    place: LinkPlace = AROUND,
    compilable: bool = True,
) -> NamedLink:
    return NamedLink(name=name, place=place, link=ForwardLink(wrap=wrap, compilable=compilable))


def marked(marks: list[str], name: str, *, compilable: bool = True) -> NamedLink:
    link = marking_link(marks, name, compilable=compilable)(nn.Identity())
    return NamedLink(name=name, place=AROUND, link=link)


def adding(number: float) -> Callable[[Forward], Forward]:
    """A wrapper that is distinguishable in the output."""

    def wrap(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return torch.cos(inner(*args, **kwargs)) + number

        return forward

    return wrap


def test_links_run_in_their_order_innermost_last() -> None:
    marks: list[str] = []
    block, x = Block(), torch.ones(2, 4)
    want = block(x, scale=3.0)
    install(block, {block: [marked(marks, "a"), marked(marks, "b"), marked(marks, "c")]})
    assert torch.equal(block(x, scale=3.0), want)
    assert marks == ["c", "b", "a"]
    assert chain_of(block).names == ("a", "b", "c")


def test_order_is_the_resolved_one_but_for_what_replaces_the_own_forward() -> None:
    links = [
        named("late", adding(1)),
        named("product", adding(2), place=OWN),
        named("early", adding(3)),
        named("first", adding(4), place=OWN),
    ]
    order = ["first", "early", "product", "late"]
    assert [link.name for link in in_order(links, order)] == ["first", "product", "early", "late"]


def test_state_dict_hooks_and_signature_do_not_see_the_chain() -> None:
    block, marks = Block(), list[str]()
    keys, signature = list(block.state_dict()), inspect.signature(block.forward)
    children = list(block.named_modules())
    block.register_forward_pre_hook(lambda module, args: marks.append("before"))
    block.register_forward_hook(lambda module, args, out: marks.append("after"))
    install(block, {block: [marked(marks, "link")], block.linear: [marked(marks, "inner")]})
    block(torch.ones(2, 4))
    assert marks == ["before", "link", "inner", "after"]
    assert list(block.state_dict()) == keys
    assert list(block.named_modules()) == children
    assert inspect.signature(block.forward) == signature
    Block().load_state_dict(block.state_dict())


def test_a_link_is_removed_from_the_middle() -> None:
    marks: list[str] = []
    block = Block()
    install(block, {block: [marked(marks, name) for name in "abc"]})
    remove(block, "b")
    remove(block, "unknown")
    block(torch.ones(4))
    assert marks == ["c", "a"]
    assert chain_of(block).names == ("a", "c")


def test_outermost_links_last_as_long_as_their_context_even_overlapping() -> None:
    marks: list[str] = []
    block, x = Block(), torch.ones(4)
    own, attributes = block.forward, {*block.__dict__}
    first, second = (linked({block: marked(marks, name)}) for name in ("first", "second"))
    with first:
        second.__enter__()
        block(x)
        assert marks == ["second", "first"]
    assert chain_of(block).names == ("second",)
    second.__exit__(None, None, None)
    assert chain_of(block).names == ()
    assert block.forward == own
    assert {*block.__dict__} == attributes


def test_a_forward_that_was_an_attribute_is_back_when_the_links_are_gone() -> None:
    block = Block()
    block.forward = replaced = lambda x: x  # type: ignore[method-assign]
    with linked({block: named("link", adding(1))}):
        assert block.forward is not replaced
    assert block.forward is replaced


def test_a_failing_link_leaves_no_other_behind() -> None:
    block = Block()
    links = {block.linear: named("a", adding(1)), block: named("b", lambda inner: None)}  # type: ignore[arg-type,return-value]
    with pytest.raises(HookError, match="'b' wraps a forward in None; expected a function"):
        linked(links).__enter__()
    assert chain_of(block.linear).names == chain_of(block).names == ()


@pytest.mark.parametrize(
    ("links", "told"),
    [
        ([("a", AROUND), ("a", AROUND)], "forward of a Block: 'a' links it twice"),
        ([("a", COMPILER), ("b", COMPILER)], "'a' and 'b' compile it; enable one"),
    ],
)
def test_links_that_cannot_stand_together_are_refused(
    links: list[tuple[str, LinkPlace]], told: str
) -> None:
    block = Block()
    with pytest.raises(HookError, match=told):
        install(block, {block: [named(name, adding(1), place=place) for name, place in links]})


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_a_copy_that_would_compute_with_other_weights_is_refused(
    copied: Callable[[nn.Module], object],
) -> None:
    block = Block()
    told = r"links: adapter.*load this one's state_dict"
    with linked({block: named("adapter", adding(1))}), pytest.raises(TypeError, match=told):
        copied(block)
    copied(block)


def test_a_chain_costs_no_more_frames_than_nested_functions() -> None:
    depth: list[int] = []

    class Deep(nn.Module):
        def forward(self) -> None:
            depth.append(len(inspect.stack(0)))

    def through(inner: Forward) -> Forward:
        return lambda *args, **kwargs: inner(*args, **kwargs)

    plain, module = Deep(), Deep()
    plain.forward = through(through(plain.forward))  # type: ignore[method-assign]
    plain()
    install(module, {module: [named("a", through), named("b", through, compilable=False)]})
    module()
    assert depth[0] == depth[1]


# -- graphs -----------------------------------------------------------------------------------


class Compiled:
    """A compiler's link, the operations of its graphs, and which wraps were traced."""

    def __init__(self) -> None:
        self.counter = CompileCounter()
        self.traced: list[str] = []
        run = torch.compile(lambda f, *args: f(*args), backend=self.counter)
        self.link = named("compile", lambda f: lambda *args: run(f, *args), place=COMPILER)

    def seeing(self, name: str, number: float, *, compilable: bool) -> NamedLink:
        """A link that notes its name wherever a compiler traces it."""

        def wrap(inner: Forward) -> Forward:
            def forward(*args: Any) -> Any:
                if torch.compiler.is_compiling():
                    self.traced.append(name)
                return torch.cos(inner(*args)) + number

            return forward

        return named(name, wrap, compilable=compilable)


def compiled_block(pattern: str) -> tuple[Compiled, Tensor, Tensor]:
    """A chain with ``c`` for links that may be compiled and ``n`` for others, innermost first.

    Returns:
        What was compiled, the output and what nested functions without a compiler give.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    compiled, block, x = Compiled(), Block(), torch.randn(3, 4)
    links = [
        compiled.seeing(f"{letter}{place}", place, compilable=letter == "c")
        for place, letter in enumerate(pattern)
    ]
    with torch.no_grad():
        want = block(x)
        for place in range(len(pattern)):
            want = torch.cos(want) + place
        install(block, {block: [compiled.link, *links]})
        out = block(x)
    return compiled, out, want


@pytest.mark.parametrize(
    ("pattern", "graphs", "traced"),
    [
        ("", 1, set()),
        ("cc", 1, {"c0", "c1"}),
        ("n", 1, set()),
        ("cnc", 2, {"c0", "c2"}),
        ("nn", 1, set()),
        ("ncnc", 3, {"c1", "c3"}),
    ],
)
def test_each_run_of_links_is_one_graph_and_the_others_in_none(
    pattern: str, graphs: int, traced: set[str]
) -> None:
    compiled, out, want = compiled_block(pattern)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-6)
    assert compiled.counter.frame_count == graphs
    assert {*compiled.traced} == traced


@torch.no_grad()
@pytest.mark.parametrize("compilable", [True, False])
def test_a_graph_ends_at_a_link_inside_it_that_may_not_be_compiled(compilable: bool) -> None:
    torch.compiler.reset()
    compiled, block, x = Compiled(), Block(), torch.ones(3, 4)
    want = torch.sin(torch.cos(block.linear(x)) + 5) * 2
    inner = compiled.seeing("inner", 5.0, compilable=compilable)
    install(block, {block: [compiled.link], block.linear: [inner]})
    torch.testing.assert_close(block(x), want, rtol=0, atol=1e-6)
    assert bool(compiled.traced) == compilable
    # Before the link there is nothing to compute; after it, a sine and a product.
    assert compiled.counter.frame_count == 1
    assert (compiled.counter.op_count == 2) is not compilable


def test_links_of_the_own_forward_end_a_graph_together() -> None:
    torch.compiler.reset()
    compiled, block = Compiled(), Block()
    given: list[Forward] = []

    def product(inner: Forward) -> Forward:
        given.append(inner)
        return lambda x: x * 3

    links = [
        named("a", product, place=OWN, compilable=False),
        named("b", product, place=OWN),
        compiled.link,
        named("outer", adding(1)),
    ]
    own = block.forward
    install(block, {block: links})
    assert given[0] == own
    assert given[1](2) == 6  # what the first returned, and no graph's end around it
    torch.testing.assert_close(block(torch.ones(2)), torch.cos(torch.full((2,), 3.0)) + 1)
    assert compiled.counter.frame_count == 1
