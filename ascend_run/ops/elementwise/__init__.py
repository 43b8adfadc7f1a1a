"""Norms, activations, RoPE and a fused optimizer step, each as one autograd node."""
