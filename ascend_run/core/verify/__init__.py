"""Whether a run computes what another computes: probes on ranks, records, and their comparison.

``probe`` runs on every rank and answers a Record; ``comparison`` needs two lists of them and no
process group.
"""
