"""Attention: masks, blockwise and fused kernels, and context parallelism."""
