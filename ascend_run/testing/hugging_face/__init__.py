"""Model families compared with transformers, on random folders that it writes."""
