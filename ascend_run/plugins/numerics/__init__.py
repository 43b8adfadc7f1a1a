"""Reproducibility and precision."""
