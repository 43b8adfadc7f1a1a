"""Compare a converted model with its source."""
