"""Fingerprint each step with a 64-bit hash, so that two runs can be compared cheaply."""
