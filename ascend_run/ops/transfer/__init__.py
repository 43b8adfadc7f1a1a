"""What moves tensors between ranks, or between a device and its host."""
