"""ascend-run: a plugin-based microkernel for training large language models."""

__version__ = "0.1.0"
