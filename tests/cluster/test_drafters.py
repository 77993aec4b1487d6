"""A drafter's actor beside its target: it drafts, it may die or freeze, and nobody's text shows it."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.heads import write_random_head
from tests.support.processes import own_processes

BACK_S = 30.0  # a drafter is replaced in so long
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0.8, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def drafted(deployer: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from ray import serve

    head = write_random_head(tmp_path_factory.mktemp("head"), tiny_model, 3, draft_vocab_size=512)
    speculative = {"algorithm": "EAGLE3", "draft_model_path": str(head)}
    yield deployer.deploy("drafted", "/drafted", speculative=speculative, max_running_requests=4)
    serve.delete("drafted")


@pytest.fixture(scope="module")
def expected(deployer: Any) -> str:
    """What plain decoding says to LONG."""
    from ray import serve

    text = text_of(deployer.deploy("plain", "/plain").complete(**LONG))
    serve.delete("plain")
    return text


def text_of(reply: Any) -> str:
    return str(reply["choices"][0]["text"])


def metric(app: Any, name: str) -> float:
    lines = app.http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def num_drafts(app: Any) -> float:
    return metric(app, "specray_spec_decode_num_draft_tokens_total")


def test_the_actor_drafts_and_the_text_is_that_of_plain_decoding(drafted: Any, expected: str) -> None:
    before = num_drafts(drafted)
    assert text_of(drafted.complete(**LONG)) == expected
    assert num_drafts(drafted) > before
    assert metric(drafted, "specray_draft_faults_total") == 0


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_drafter_costs_nothing_but_time_and_comes_back(
    drafted: Any, expected: str, kill: signal.Signals
) -> None:
    faults = metric(drafted, "specray_draft_faults_total")
    with ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(drafted.complete, **LONG) for _ in range(4)]
        time.sleep(0.3)
        for process in own_processes("ray::DraftActor"):
            os.kill(process, kill)
        assert [text_of(reply.result()) for reply in replies] == [expected] * 4
    deadline = time.monotonic() + BACK_S
    lost = num_drafts(drafted)
    while num_drafts(drafted) == lost and time.monotonic() < deadline:
        assert expected.startswith(text_of(drafted.complete(**LONG | {"max_tokens": 8})))
        time.sleep(0.2)
    assert num_drafts(drafted) > lost
    assert metric(drafted, "specray_draft_faults_total") > faults
    assert text_of(drafted.complete(**LONG)) == expected
