"""Text to token ids without torch: sources, handlers, chat templates, labels, packing."""
