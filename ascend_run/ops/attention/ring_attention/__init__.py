"""Attention over a sequence that several ranks share, by keys and values that go round a ring.

``cut`` and ``blocks`` import no torch.
"""
