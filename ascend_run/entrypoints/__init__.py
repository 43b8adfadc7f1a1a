"""The commands of ``ascend-run``."""
