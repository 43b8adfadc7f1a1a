"""Recompute forwards of a pipeline rank before their backward, while the rank waits for gradients.

What is recomputed when depends on the schedule alone, never on whether a tensor has arrived: so all
ranks of a pipeline stage call the collectives within a recomputed forward in the same order.
"""
