"""Load weights of a Hugging Face folder into our parameters with a family's tensor maps."""
