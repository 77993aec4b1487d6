"""The HTTP API in OpenAI's and SGLang's shapes. Only `ingress` depends on Ray: the routes run under any ASGI server."""
