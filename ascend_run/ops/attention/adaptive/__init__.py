"""Attention over a shared sequence where the mask decides who holds what, and what travels.

All but ``kernel`` imports no torch.
"""
