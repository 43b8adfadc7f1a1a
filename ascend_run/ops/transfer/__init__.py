"""Tensor transfers between ranks, and between a device and its host."""
