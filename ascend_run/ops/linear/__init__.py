"""Parallel linears, and the matmuls, collectives and losses they use."""
