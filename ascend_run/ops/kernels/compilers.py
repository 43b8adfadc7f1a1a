"""What torch.compile requires of the machine. No torch."""

from __future__ import annotations

import os
import shutil
from typing import Final

COMPILERS: Final = ("g++", "c++", "clang++")
"""Compilers that torch searches for on the CPU, unless ``CXX`` names another."""


def missing_compiler() -> str:
    """Return the C++ compilers that were searched for if none is found, else an empty string."""
    named = os.environ.get("CXX")
    looked_for = [named] if named else COMPILERS
    return "" if any(map(shutil.which, looked_for)) else ", ".join(looked_for)
