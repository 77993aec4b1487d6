"""The OpenAI- and SGLang-compatible HTTP API. Only `ingress` depends on Ray; the routes run under any ASGI server."""
