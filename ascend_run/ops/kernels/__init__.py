"""Which kernel computes an operator: the table, other libraries' kernels, compilers."""
