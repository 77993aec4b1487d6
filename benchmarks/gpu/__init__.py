"""`python -m benchmarks.gpu`: what a GPU computes, how fast, and as it is served."""
