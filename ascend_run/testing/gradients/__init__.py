"""Gradients compared with differences of the function that they are gradients of."""
