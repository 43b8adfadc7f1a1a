"""Which plugins exist, which may run together, and why."""

from .discovery import Candidate, Catalogue, Loaded, discover, joint_refusal
from .explanation import HookOwners, check_hooks, explain_hooks, explain_plugin, idle
from .hooks import HookPoint, hook_points, hook_problems, implementations
from .kinds import CHOSEN_WITH, GROUPS, Kind, Plugin, kind_of
from .lock import plugin_lock
from .resolution import Resolution, check_conditions, resolve

__all__ = [
    "CHOSEN_WITH",
    "GROUPS",
    "Candidate",
    "Catalogue",
    "HookOwners",
    "HookPoint",
    "Kind",
    "Loaded",
    "Plugin",
    "Resolution",
    "check_conditions",
    "check_hooks",
    "discover",
    "explain_hooks",
    "explain_plugin",
    "hook_points",
    "hook_problems",
    "idle",
    "implementations",
    "joint_refusal",
    "kind_of",
    "plugin_lock",
    "resolve",
]
