"""Which plugins exist, and which of them can run together.

``discovery`` finds plugins, ``resolution`` orders a set or rejects it, ``hooks`` checks
their implementations, ``lock`` records their exact versions. Nothing is imported here,
because listing plugins needs only ``discovery`` and should take no more than 0.1 s.
"""
