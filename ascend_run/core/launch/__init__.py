"""Launch ranks: start them here, join ranks started by another launcher, or run in this process.

Imports no torch, except ``agent``, which is imported only to start ranks.
"""
