"""Platforms: a device with its operators."""
