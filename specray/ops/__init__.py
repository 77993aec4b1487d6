"""Tensor operations: noise, sampling, attention and matmuls."""
