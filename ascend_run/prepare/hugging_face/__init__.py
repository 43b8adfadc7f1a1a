"""Convert a Hugging Face config.json to keys of ``[model]``, and back."""
