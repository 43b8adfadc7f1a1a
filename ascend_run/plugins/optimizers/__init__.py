"""Optimizers beside the built-in AdamW."""
