"""Additions to torch_npu."""
