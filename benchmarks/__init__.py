"""Benchmarks against other systems, measured alternately in one session; docs/benchmarks.md."""
