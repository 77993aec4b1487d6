"""OpenAI's /v1/completions."""
