"""Megatron, imported before the first test module asks for it."""

from tests.support.no_network import no_network as no_network
from tests.support.quiet_imports import import_quietly

import_quietly("megatron.core.models.gpt")
