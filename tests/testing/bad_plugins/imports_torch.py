"""Wrong: torch at import."""

import torch  # noqa: F401

from .base import Listens, declared


class ImportsTorch(Listens):
    manifest = declared("imports-torch")
