"""What torch.compile needs of a machine. No torch."""

from __future__ import annotations

import os
import shutil
from typing import Final

COMPILERS: Final = ("g++", "c++", "clang++")
"""What torch looks for on the CPU, unless ``CXX`` names another."""


def missing_compiler() -> str:
    """The C++ compilers that were looked for, where none of them is there; else nothing."""
    named = os.environ.get("CXX")
    looked_for = [named] if named else COMPILERS
    return "" if any(map(shutil.which, looked_for)) else ", ".join(looked_for)
