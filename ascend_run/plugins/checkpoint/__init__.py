"""Gathering and writing of checkpoints."""
