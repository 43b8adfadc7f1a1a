"""Expert MLPs: permutation, grouped GEMMs, quantised ones, and their collectives."""
