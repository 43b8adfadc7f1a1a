"""From token files to micro-batches.

Without torch: tokenizer, indexed, sidecar, index_cache. With torch: epochs, samples, batches.
"""
