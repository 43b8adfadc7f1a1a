"""Text to token files, and token files to micro-batches.

Without torch: tokenizer, documents, corpus, indexed, sidecar, checks, index_cache, preprocess.
With torch: epochs, samples, batches.
"""
