"""One worker per rank: the request table, the model, the KV pool and the drafts' source."""
