"""The commands behind `specray serve` and `specray check`, and the process that runs Ray and Serve."""
