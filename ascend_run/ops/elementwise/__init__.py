"""Norms, activations, rotations and the optimizer's step, each in one autograd node."""
