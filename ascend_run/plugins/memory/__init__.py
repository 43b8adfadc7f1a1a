"""Placement of activations that are saved for backward."""
