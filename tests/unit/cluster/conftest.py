"""A server without Ray, see `tests.support.scripted_server`."""

from tests.support.scripted_server import serve, tokenizer

__all__ = ["serve", "tokenizer"]
