"""Metric writers."""
