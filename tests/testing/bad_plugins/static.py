"""Wrong before anything runs."""

from __future__ import annotations

from typing import Any

import attrs

from ascend_run.plugin_api import Claim, Manifest, Numerics, hookimpl

from .base import Listens, declared


class IsRight(Listens):
    manifest = declared("is-right")


class HasAnotherName(Listens):
    manifest = declared("another-name")


class ForgetsAnAlias(Listens):
    manifest = declared("forgets-an-alias", aliases=("its-alias",))


class LeavesNumericsOut(Listens):
    manifest = Manifest(name="leaves-numerics-out", summary="says less than it must", level=2)


class ClaimsWhatAHookClaims(Listens):
    manifest = declared("claims-what-a-hook-claims", claims=(Claim.NORM,))

    @hookimpl
    def ascend_norm(self) -> Any:
        return None


class MisspellsAHook(Listens):
    manifest = declared("misspells-a-hook")

    @hookimpl
    def ascend_self_atention(self) -> Any:
        return None


@attrs.define
class Changeable:
    size: int = attrs.field(default=1, validator=attrs.validators.ge(1))


class OptionsThatChange(Listens):
    manifest = declared("options-that-change")
    config_class = Changeable

    def __init__(self, config: Any) -> None:
        self.config = config


@attrs.frozen
class Boundless:
    size: int = 1
    """How many rows at once."""


class OptionsWithoutBound(Listens):
    manifest = declared("options-without-bound")
    config_class = Boundless

    def __init__(self, config: Any) -> None:
        self.config = config


@attrs.frozen
class HalfBounded:
    size: int = attrs.field(default=1, validator=attrs.validators.le(8))
    """How many rows at once."""


class OptionsWithoutLeast(OptionsWithoutBound):
    manifest = declared("options-without-least")
    config_class = HalfBounded


@attrs.frozen
class Zero:
    size: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    """How many rows at once."""


class CrashesAtItsBound(OptionsWithoutBound):
    manifest = declared("crashes-at-its-bound")
    config_class = Zero

    @hookimpl
    def ascend_configure(self) -> Any:
        rows = 8 // self.config.size
        return lambda arguments: {**arguments} if rows else arguments


class MisspellsAnother(Listens):
    manifest = declared("misspells-another", after=("pretrian",))


class SharesState(Listens):
    manifest = declared("shares-state", numerics=Numerics.BITWISE)
    seen: list[int] = []  # noqa: RUF012 - the fault


class HasNoPage(Listens):
    manifest = declared("has-no-word-in-the-readme")
