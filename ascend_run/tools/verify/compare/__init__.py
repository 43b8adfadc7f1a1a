"""Compare the records of two runs; needs no process group."""
