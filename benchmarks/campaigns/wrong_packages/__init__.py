"""Packages of plugins that are right, and the same packages with one plausible mistake each."""
