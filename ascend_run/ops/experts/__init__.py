"""Feed-forwards of experts: permutation, grouped products, quantised ones, their collectives."""
