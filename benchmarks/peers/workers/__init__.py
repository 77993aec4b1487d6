"""One worker per engine: loads a model once and answers batches. Runs in the engine's own environment."""
