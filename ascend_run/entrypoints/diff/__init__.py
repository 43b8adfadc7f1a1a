"""``ascend-run diff``: where two runs part, and what is not the same about them."""
