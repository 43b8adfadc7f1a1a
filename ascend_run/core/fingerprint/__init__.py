"""A 64-bit hash of each step of a run, so that two runs can be told apart by one comparison."""
