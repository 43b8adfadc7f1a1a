"""Checkpoint formats: each is read as, and written from, a stream of full parameters."""
