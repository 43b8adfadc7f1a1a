"""Kernels for attention, norms and activations, and compilation of layers."""
