"""One worker per rank: the model, the KV pool, the step's input and output, and the source of drafts."""
