"""Models: locating and reading checkpoints, tokenizers, target models and draft heads."""
