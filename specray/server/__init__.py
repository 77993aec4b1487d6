"""The HTTP server: OpenAI's, Anthropic's and SGLang's APIs, and the choice of an engine. Any ASGI server can run it."""

OPERATOR_LOG = "ray.serve"  # the logger of messages for operators: Serve's replicas show it, and name themselves in it
