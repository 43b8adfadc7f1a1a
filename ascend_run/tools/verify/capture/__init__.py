"""What ranks record of a run for ``verify``: moments of activations, gradients and weights."""
