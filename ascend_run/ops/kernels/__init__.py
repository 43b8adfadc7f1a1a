"""Kernel selection: the operator catalog, third-party kernels, compilers."""
