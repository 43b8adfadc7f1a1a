"""Context-parallel attention: one engine, driven by a plan.

``plan`` defines which rank holds what and how keys are routed, ``cost`` computes what that costs,
and ``kernel`` builds the attention kernel. ``plan``, ``cost``, ``options``, the partitions and the
schedules import no torch.
"""
