"""What a GPU does with the Triton kernels: `python -m benchmarks.gpu check|speed`. Needs torch and triton, no Ray."""
