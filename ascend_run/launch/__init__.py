"""Start the ranks of a run, here and on other nodes, and report the rank that failed first.

A process of its own beside the ranks, which holds no model. Only ``agent`` and ``rendezvous``
import torch.
"""
