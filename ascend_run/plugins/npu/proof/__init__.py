"""What proves the calls of ``operators`` without a device; nothing of it runs in training.

- ``recording``: every call inside a block, argument by argument; ``binding`` holds it against a
  schema.
- ``releases``: the schemas of every release of torch_npu from 2.7 on, read from its libraries
  (``libraries``).
- ``probe``: the same question for the torch_npu of this machine, with or without CANN
  (``stand_ins``), and what its meta kernels answer (``answers``).
"""
