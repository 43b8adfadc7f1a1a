"""Generation: a key-value cache in pages, and continuous batches."""
