"""The conformance checks for all plugins, built-in and third-party.

Each has a code, which is the name of its test and starts its error message. The checks do not
depend on core: trials run through ``testing.runtime.Runtime``.
"""

from __future__ import annotations

from typing import Final

from . import (
    construction,
    declaration,
    documentation,
    families,
    footprint,
    gradients,
    importing,
    listening,
    needs,
    numbers,
    options,
    resuming,
)
from .check import Check, DoesNotApply, Verdict
from .subject import Means, Subject

__all__ = ["CHECKS", "Check", "DoesNotApply", "Means", "Subject", "Verdict"]

CHECKS: Final = (
    Check(
        "KIT-LOAD",
        "it can be imported, and its entry point, group and manifest match",
        declaration.loads,
    ),
    Check("KIT-NAMES", "each of its names has an entry point to its class", declaration.names),
    Check("KIT-MANIFEST", "its manifest is explicit where it matters", declaration.manifest),
    Check("KIT-HOOKS", "its hooks are the API's, and no claim is made twice", declaration.hooks),
    Check("KIT-IMPORT", "importing it has no side effects", importing.imports_quietly),
    Check(
        "KIT-OPTIONS", "its options are frozen and documented, with defaults", options.documented
    ),
    Check("KIT-BOUNDS", "its numeric options have bounds, named in messages", options.bounded),
    Check("KIT-STATE", "two instances share no mutable state", construction.reentrant),
    Check(
        "KIT-PATCH", "it replaces nothing without declaring a patch", footprint.patches_are_declared
    ),
    Check("KIT-UNDO", "a run restores the state of the process", footprint.leaves_no_trace),
    Check("KIT-AGAIN", "a second run in one process equals the first one", footprint.runs_twice),
    Check("KIT-DRAWS", "a bitwise plugin draws no random numbers", footprint.draws_nothing),
    Check("KIT-IDLE", "it has no effect when it declares to be idle", numbers.idle),
    Check("KIT-PARITY", "results change only as its manifest declares", numbers.at_parity),
    Check("KIT-NEEDS", "it declares what it needs of the attention kernel", needs.are_declared),
    Check("KIT-LISTENERS", "each of its listeners is called in a run", listening.are_called),
    Check("KIT-GRADIENTS", "gradients are the derivatives of the loss", gradients.are_derivatives),
    Check("KIT-RESUME", "a resumed run equals an uninterrupted run", resuming.resumes),
    Check(
        "KIT-FAMILY", "a model family computes what transformers does", families.equals_transformers
    ),
    Check("KIT-DOCS", "a page names it and each of its options", documentation.has_a_page),
)
"""In the order of execution: cheap checks that explain later failures come first, and checks of the
process state come before other runs in it."""
