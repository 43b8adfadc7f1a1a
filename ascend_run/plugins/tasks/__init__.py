"""Training tasks: datasets, batches and the loss."""
