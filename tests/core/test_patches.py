"""Applying and undoing patches, on a module made for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import attrs
import pytest

from ascend_run.core.patches import applied, source_hash
from ascend_run.plugin_api import Patch, PlatformError

PATCH = Patch(
    target="textwrap:indent",
    replacement=str.upper,
    why="a test",
    versions=">=3.11",
    source_hash=None,
    until="never",
)
"""Of a module of Python's own, to which the versions are compared."""


class Parent:
    """Has what its child inherits."""

    size = 1


class Child(Parent):
    """A class whose attributes may be refused."""


class Watched(ModuleType):
    """A module that notes what is set in it, and refuses the originals of some names."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        vars(self).update(first=1, second=2, third=3, refused=set(), order=[], Child=Child)

    def __setattr__(self, name: str, value: Any) -> None:
        self.order.append((name, value))
        if (name, value) in self.refused:
            raise TypeError(f"planted: {name}")
        super().__setattr__(name, value)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A module of the standard library's ``xml``, so it has a version."""
    made = Watched("xml.watched")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def of(name: str, replacement: Any = 0, **changes: Any) -> tuple[str, Patch]:
    return "patcher", attrs.evolve(
        PATCH, target=f"xml.watched:{name}", replacement=replacement, **changes
    )


def test_patches_are_undone_in_reverse_order(module: Watched) -> None:
    with applied([of("first"), of("second"), of("third")]):
        assert (module.first, module.second, module.third) == (0, 0, 0)
    assert module.order[3:] == [("third", 3), ("second", 2), ("first", 1)]


def test_patches_are_undone_where_undoing_one_fails(module: Watched) -> None:
    module.refused.add(("second", 2))
    with (
        pytest.raises(TypeError, match="planted: second"),
        applied([of("first"), of("second"), of("third")]),
    ):
        pass
    assert (module.first, module.second, module.third) == (1, 0, 3)


def test_a_patch_that_cannot_be_set_takes_all_back(module: Watched) -> None:
    module.refused.add(("second", 0))
    with pytest.raises(TypeError, match="planted"), applied([of("first"), of("second")]):
        raise AssertionError("it was applied all the same")
    assert module.first == 1


def test_an_inherited_attribute_is_inherited_again(module: Watched) -> None:
    with applied([of("Child.size", 5)]):
        assert (Child.size, Parent.size) == (5, 1)
    assert "size" not in vars(Child)
    assert Child.size == 1


def test_a_wrapper_is_given_the_target(module: Watched) -> None:
    with applied([of("third", lambda plain: plain + 1, wraps=True)]):
        assert module.third == 4
    assert module.third == 3


def test_a_missing_target_is_defined_only_where_the_patch_says_so(module: Watched) -> None:
    with (
        pytest.raises(PlatformError, match="fourth does not exist"),
        applied([of("fourth")]),
    ):
        raise AssertionError("it was applied all the same")
    with applied([of("fourth", 4, missing_ok=True)]):
        assert module.fourth == 4
    assert not hasattr(module, "fourth")


def test_every_patch_that_does_not_fit_is_named_at_once(module: Watched) -> None:
    with (
        pytest.raises(PlatformError) as refused,
        applied([of("first", versions="<3"), of("second"), of("fourth")]),
    ):
        raise AssertionError("it was applied all the same")
    first, fourth = refused.value.problems
    python = ".".join(map(str, sys.version_info[:3]))
    assert first == f"'patcher': xml.watched:first was checked against Python <3, found {python}"
    assert "fourth" in fourth


def written() -> int:
    return 1


@pytest.mark.parametrize(
    ("target", "hashes", "problem"),
    [
        (written, None, f"expected a source_hash, found {source_hash(written)}"),
        (written, "0" * 16, f"has changed: expected {'0' * 16}, found {source_hash(written)}"),
        (written, ("0" * 16, "1" * 16), f"expected {'0' * 16} or {'1' * 16}, found"),
        (Parent, None, f"expected a source_hash, found {source_hash(Parent)}"),
        (property(written), None, f"expected a source_hash, found {source_hash(written)}"),
        (len, "0" * 16, f"expected {'0' * 16}, found no Python source"),
        (sys, "0" * 16, f"expected {'0' * 16}, found no Python source"),
    ],
    ids=["unhashed", "changed", "several", "class", "property", "compiled", "module"],
)
def test_a_hash_is_asked_for_where_there_is_source_and_only_there(
    module: Watched, target: Any, hashes: Any, problem: str
) -> None:
    module.code = target
    with pytest.raises(PlatformError) as refused, applied([of("code", source_hash=hashes)]):
        raise AssertionError("it was applied all the same")
    assert problem in str(refused.value)


@pytest.mark.parametrize("hashed", [source_hash, lambda code: ("0" * 16, source_hash(code))])
def test_one_of_several_hashes_is_enough(module: Watched, hashed: Callable[..., Any]) -> None:
    module.code = written
    with applied([of("code", source_hash=hashed(written))]):
        assert module.code == 0
    assert module.code is written


def test_the_runs_own_failure_is_not_lost(module: Watched) -> None:
    with suppress(ZeroDivisionError), applied([of("first")]):
        raise ZeroDivisionError
    assert module.first == 1


def test_a_group_is_the_package_where_none_is_named() -> None:
    assert PATCH.group == "textwrap"
    assert of("first", group="mine")[1].group == "mine"
