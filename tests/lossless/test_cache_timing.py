"""The work until the first token, and so its time, does not tell a tenant what another one has asked.

The work is counted, because times of a busy machine differ for other reasons.
"""

import asyncio
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx
import pytest

from cluster.config import AppConfig
from specray.step import StepPlan
from tests.support.local_server import LocalRanks, LocalServer, local_server
from tests.support.toy import write_toy

PAIRS = 8
LENGTH = 224  # tokens of a prompt, of 256
VICTIM, ATTACKER = "v" * 32, "a" * 32


class Work(NamedTuple):
    """What a request of one token costs, step by step, and what its answer says about it."""

    num_tokens: list[int]  # computed in each step
    num_blocks: list[int]  # of the KV pool that are taken for each step
    num_cached: int


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """All plans that the rank gets."""
    plans: list[StepPlan] = []
    submit = LocalRanks.submit
    monkeypatch.setattr(LocalRanks, "submit", lambda self, plan: plans.append(plan) or submit(self, plan))
    return plans


async def work_of(http: httpx.AsyncClient, plans: list[StepPlan], prompt: list[int], key: str) -> Work:
    plans.clear()
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    reply = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    steps = [plan for plan in plans if plan.rows]
    remaining = {new.slot: len(new.token_ids) - new.num_computed_tokens for new in steps[0].new_requests}
    num_tokens = []
    for plan in steps:
        [row] = plan.rows
        num_tokens.append(min(row.num_tokens, remaining[row.slot]))
        remaining[row.slot] -= num_tokens[-1]
    assert set(remaining.values()) == {0}
    details = reply.json()["usage"].get("prompt_tokens_details") or {}
    return Work(num_tokens, [len(plan.rows[0].new_block_ids) for plan in steps], details.get("cached_tokens", 0))


async def works_of(server: LocalServer, plans: list[StepPlan], asker: str) -> tuple[list[Work], list[Work]]:
    """Of `asker`'s requests for prompts that the victim has just asked, and for new ones."""
    random, asked, new = Random(0), [], []
    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for number in range(PAIRS):
            prompt, other = ([random.randrange(4, 64) for _ in range(LENGTH)] for _ in range(2))
            await work_of(http, plans, prompt, VICTIM)
            for tokens, works in ((prompt, asked), (other, new))[:: 1 if number % 2 else -1]:
                works.append(await work_of(http, plans, tokens, asker))
    return asked, new


def test_the_work_until_the_first_token_is_that_of_a_new_prompt(tmp_path: Path, plans: list[StepPlan]) -> None:
    """For another tenant. The same tenant's is smaller, so the test can see a difference."""
    (tmp_path / "model").mkdir()
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"victim {VICTIM}\nattacker {ATTACKER}\n")
    options = {
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "max_total_tokens": 4096,
        "chunked_prefill_size": 64,
        "server": {"api_key_file": str(keys)},
    }
    config = AppConfig.model_validate({"model": str(write_toy(tmp_path / "model")), **options})

    async def measure() -> list[tuple[list[Work], list[Work]]]:
        async with local_server(config) as server:
            return [await works_of(server, plans, asker) for asker in (VICTIM, ATTACKER)]

    (own_asked, own_new), (asked, new) = asyncio.run(measure())
    assert asked == new == own_new
    assert all(sum(work.num_tokens) == LENGTH and len(work.num_tokens) > 1 and not work.num_cached for work in asked)
    assert all(sum(work.num_tokens) <= 16 for work in own_asked)
