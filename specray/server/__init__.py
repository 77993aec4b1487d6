"""The HTTP server: OpenAI's, Anthropic's and SGLang's APIs, and the choice of an engine. Any ASGI server can run it."""
