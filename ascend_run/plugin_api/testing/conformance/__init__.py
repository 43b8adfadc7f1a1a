"""The checks that every plugin passes, ours and third parties' alike.

Each has a code, which is the name of its test and the first word of its message. They know no
core: what runs, runs through ``testing.runtime.Runtime``.
"""

from __future__ import annotations

from typing import Final

from . import (
    construction,
    declaration,
    documentation,
    footprint,
    importing,
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
        "it can be imported, and its entry point, group and manifest agree",
        declaration.loads,
    ),
    Check("KIT-NAMES", "each of its names has an entry point to its class", declaration.names),
    Check("KIT-MANIFEST", "its manifest writes out what a user decides by", declaration.manifest),
    Check("KIT-HOOKS", "its hooks are the API's, and its claims are its hooks'", declaration.hooks),
    Check("KIT-IMPORT", "importing it does nothing but define it", importing.imports_quietly),
    Check(
        "KIT-OPTIONS", "its options are frozen and documented, with defaults", options.documented
    ),
    Check("KIT-BOUNDS", "numbers among its options have bounds that are told", options.bounded),
    Check("KIT-STATE", "two instances share nothing that changes", construction.reentrant),
    Check(
        "KIT-PATCH", "it replaces nothing without declaring a patch", footprint.patches_are_declared
    ),
    Check("KIT-UNDO", "a run leaves the process as it was", footprint.leaves_no_trace),
    Check("KIT-AGAIN", "a second run in one process is the first one again", footprint.runs_twice),
    Check(
        "KIT-DRAWS", "a plugin that changes no bit draws no random number", footprint.draws_nothing
    ),
    Check("KIT-IDLE", "where it says that it is idle it changes nothing", numbers.idle),
    Check("KIT-PARITY", "the numbers of a run are what its manifest declares", numbers.at_parity),
    Check("KIT-RESUME", "a run in two halves is the run in one piece", resuming.resumes),
    Check("KIT-DOCS", "a page names it and each of its options", documentation.has_a_page),
)
"""In the order in which they are made: what is cheap and explains the rest comes first, and what
looks at the process before what else runs in it."""
