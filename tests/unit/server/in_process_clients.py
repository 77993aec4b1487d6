"""Clients of the HTTP API over its in-process application, and engines that answer with a given text."""

from typing import Any

import anthropic
import httpx2
import openai

from tests.support.scripted_server import Server

MODEL = "toy"


def openai_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=_http_client(server), max_retries=0
    )


def anthropic_client(server: Server, api_key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url="http://test", api_key=api_key, http_client=_http_client(server), max_retries=0
    )


def answer_with(server: Server, tokenizer: Any, text: str) -> None:
    """Let the scripted engine generate `text` and its end of sequence."""
    server.ranks.script = [*tokenizer.encode(text), tokenizer.eos_token_id]


def _http_client(server: Server) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app))
