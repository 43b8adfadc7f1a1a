"""Low-rank adapters that are merged into the weights when they are read."""
