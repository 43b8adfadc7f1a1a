"""Kernels for mixture-of-experts layers."""
