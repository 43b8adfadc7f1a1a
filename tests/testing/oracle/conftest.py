"""Megatron, imported before the first test module asks for it."""

from tests.support.quiet_imports import import_quietly

import_quietly("megatron.core.optimizer_param_scheduler")
