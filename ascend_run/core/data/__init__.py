"""From token files to micro-batches.

Without torch: tokenizer, sidecar, index_cache. With torch: epochs, samples, batches.
"""
