"""The model: Megatron's GPT with our modules at its seams, built from what the hooks answer."""
