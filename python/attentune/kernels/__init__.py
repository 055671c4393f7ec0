"""Attention written in TensorIR: algorithms, with no target in them."""
