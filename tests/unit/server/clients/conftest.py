"""Servers on a socket that a whole file of tests shares, and the openai package's clients of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.config import AppConfig
from tests.support.local_server import local_server, served
from tests.support.scripted_server import byte_tokenizer, make_serve
from tests.support.toy import write_toy
from tests.unit.server.clients.sdk import KINDS, Ask, Clients, Scripted, record

CONTEXT = 4096
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def scripted(tokenizer: PreTrainedTokenizerFast) -> Iterator[Scripted]:
    """A server whose ranks generate a scripted text. Grammars are not compiled."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        serve = make_serve(tokenizer, monkeypatch)
        with served(lambda: serve(longest=1024)) as (url, server):
            clients = Clients.of(url)
            yield Scripted(url, server, clients, record(server))
            clients.close()


class Toy(NamedTuple):
    url: str
    folder: Path
    clients: Clients


@pytest.fixture(scope="module")
def toy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    """A server with a real engine: a random model of bytes that drafts n-grams."""
    folder = write_byte_toy(tmp_path_factory.mktemp("byte-toy"))
    config = AppConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_total_tokens=4 * CONTEXT,
        speculative={"algorithm": "NGRAM", "num_draft_tokens": 4},  # type: ignore[arg-type]
        server={"served_model_name": "toy"},  # type: ignore[arg-type]
    )
    with served(lambda: local_server(config)) as (url, _):
        clients = Clients.of(url)
        yield Toy(url, folder, clients)
        clients.close()


@pytest.fixture(params=KINDS)
def ask(request: pytest.FixtureRequest, toy_server: Toy) -> Ask:
    """A client of the server with a real engine."""
    return Ask(toy_server.clients, request.param)


def write_byte_toy(folder: Path) -> Path:
    """The toy model with a token for each byte, so that it can write any text."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    write_toy(folder, vocab_size=len(tokenizer))
    file = folder / "config.json"
    changes = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "max_position_embeddings": CONTEXT}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    tokenizer.save_pretrained(folder)
    return folder
