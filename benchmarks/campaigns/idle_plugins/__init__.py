"""Plugins that are enabled, implement hooks, and do nothing."""
