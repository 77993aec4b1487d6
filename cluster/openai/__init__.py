"""The HTTP surface in OpenAI's and SGLang's shapes. No Ray in here: the routes run under any ASGI server."""
