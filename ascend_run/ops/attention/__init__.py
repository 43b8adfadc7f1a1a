"""Attention: masks, kernels in pieces, and what ranks exchange for it."""
