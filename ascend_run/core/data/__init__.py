"""From token files to micro-batches.

Without torch: index_cache. With torch: epochs, samples, batches.
"""
