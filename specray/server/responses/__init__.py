"""OpenAI's Responses API over the same engines. Nothing is stored, so each request has its whole conversation."""
