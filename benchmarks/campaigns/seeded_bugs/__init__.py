"""Bugs of the kinds that users of such systems report, each a small patch of the code that runs."""
