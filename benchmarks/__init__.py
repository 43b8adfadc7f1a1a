"""Measured against peers that really run, alternating in one session; docs/benchmarks.md."""
