"""Run a program of unknown content: without network, other processes and files of the machine.

Imports no torch.
"""

from .running import Limits, Outcome, SandboxError, run_program

__all__ = ["Limits", "Outcome", "SandboxError", "run_program"]
