"""The HTTP surface in OpenAI's and SGLang's shapes. Only `ingress` knows Ray: the routes run under any ASGI server."""
