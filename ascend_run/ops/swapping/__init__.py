"""Saved tensors of layers that are on the host between a layer's forward and its backward."""
