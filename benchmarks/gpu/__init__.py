"""`python -m benchmarks.gpu check|speed`: the Triton kernels on a GPU. Needs torch and triton, not Ray."""
