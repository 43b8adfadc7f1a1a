"""ascend-run: a plugin-based microkernel for training large language models.

For authors of plugins, ``help("ascend_run.reference")`` lists the pages of the API's reference.
"""

__version__ = "0.1.0"
