"""Parallel linears and the products, messages and losses in them."""
