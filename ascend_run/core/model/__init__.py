"""The model: Megatron's GPT with our modules and the hooks' return values at its seams."""
