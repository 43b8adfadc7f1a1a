"""Estimate the cost of a run by formulas, without torch and without allocating anything."""
