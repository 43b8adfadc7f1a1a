"""Checks of the calls of ``operators`` without a device; nothing here runs in training.

- ``recording``: records every call inside a block; ``binding`` checks it against a schema.
- ``releases``: the schemas of every release of torch_npu from 2.7 on, read from its libraries
  (``libraries``).
- ``probe``: the same check for the torch_npu of this machine, with or without CANN
  (``stub_libraries``), and what its meta kernels return (``meta_results``).
"""
