"""Campaigns: counts too large for the test suite, run in full now and then; see runner.py."""
