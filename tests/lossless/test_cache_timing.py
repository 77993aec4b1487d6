"""The time to the first token does not tell a tenant what another one has asked."""

import asyncio
import time
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from random import Random
from statistics import mean, variance

import httpx
import pytest

from cluster.config import AppConfig
from tests.support.local_server import LocalServer, local_server
from tests.support.toy import write_toy

PAIRS = 40
LENGTH = 224  # tokens of a prompt, of 256
VICTIM, ATTACKER = "v" * 32, "a" * 32


def welch_t(first: Sequence[float], second: Sequence[float]) -> float:
    """Welch's t of two samples, each without its slowest fifth, which other processes made slow."""
    samples = [sorted(sample)[: len(sample) * 4 // 5] for sample in (first, second)]
    spread = sum(variance(sample) / len(sample) for sample in samples)
    return (mean(samples[0]) - mean(samples[1])) / sqrt(spread)


async def first_token_s(http: httpx.AsyncClient, prompt: list[int], key: str) -> float:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    begin = time.perf_counter()
    reply = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    return time.perf_counter() - begin


async def times_of(server: LocalServer, asker: str) -> tuple[list[float], list[float]]:
    """Seconds of `asker`'s requests for prompts that the victim has just asked, and for new ones."""
    random, asked, new = Random(0), [], []
    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for number in range(PAIRS):
            prompt, other = ([random.randrange(4, 64) for _ in range(LENGTH)] for _ in range(2))
            await first_token_s(http, prompt, VICTIM)
            for tokens, times in ((prompt, asked), (other, new))[:: 1 if number % 2 else -1]:
                times.append(await first_token_s(http, tokens, asker))
    return asked, new


@pytest.mark.slow
def test_the_time_to_the_first_token_is_that_of_a_new_prompt(tmp_path: Path) -> None:
    """For another tenant. The same tenant's is shorter, so the test can see a difference."""
    (tmp_path / "model").mkdir()
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"victim {VICTIM}\nattacker {ATTACKER}\n")
    options = {
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "max_total_tokens": 8192,
        "server": {"api_key_file": str(keys)},
    }
    config = AppConfig.model_validate({"model": str(write_toy(tmp_path / "model", num_layers=8)), **options})

    async def measure() -> tuple[float, float]:
        async with local_server(config) as server:
            return welch_t(*await times_of(server, VICTIM)), welch_t(*await times_of(server, ATTACKER))

    own, others = asyncio.run(measure())
    print(f"Welch t of one's own prompts {own:.1f}, of another tenant's {others:.1f}")
    assert own < -4.5
    assert abs(others) < 4.5
