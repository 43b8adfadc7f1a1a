"""Collectives overlapped or fused with matmuls."""
