"""A colocated drafter: it drafts, freezes or is replaced, and the text stays that of plain decoding."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specray.llm import LLM
from specray.sampling_params import SamplingParams
from tests.cluster.conftest import ADMIN_KEY
from tests.support.heads import write_random_head
from tests.support.processes import own_processes, wait_until

AUTHORIZED = {"Authorization": f"Bearer {ADMIN_KEY}"}
REPLACEMENT_S = 30.0  # within which a drafter is replaced
PARAMS: dict[str, Any] = {"max_tokens": 250, "temperature": 0.8, "seed": 3, "ignore_eos": True}
LONG = {"prompt": "Once upon a time", **PARAMS}


@pytest.fixture(scope="module")
def eagle(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    head = write_random_head(tmp_path_factory.mktemp("head"), tiny_model, 3, draft_vocab_size=512)
    return {"algorithm": "EAGLE3", "draft_model_path": str(head)}


@pytest.fixture(scope="module")
def drafted(large_app: Any, eagle: dict[str, Any]) -> Any:
    """The application with an EAGLE-3 head in place of its custom drafter."""
    drafter_of(replace(large_app, eagle))
    return large_app


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> str:
    """The text of plain decoding for LONG, without a cluster."""
    with LLM(model=str(tiny_model), dtype="float32", device="cpu", max_total_tokens=4096) as llm:
        [generation] = llm.generate([LONG["prompt"]], SamplingParams(**PARAMS))
    return generation.choices[0].text


def text_of(reply: Any) -> str:
    return str(reply["choices"][0]["text"])


def is_start(text: str, whole: str) -> bool:
    """Whether a text that ends after some tokens is the whole one's start; the last character may be incomplete."""
    return whole.startswith(text.rstrip("\ufffd"))


def metric(app: Any, name: str) -> float:
    lines = app.http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def faults(app: Any) -> float:
    """Faults that end a drafter; lateness is not one, because a busy machine may cause it."""
    return metric(app, "specray_draft_faults_total")


def num_drafters() -> int:
    """Number of running drafter processes."""
    return len(own_processes("ray::DraftActor"))


def num_drafts(app: Any) -> float:
    return metric(app, "specray_spec_decode_num_draft_tokens_total")


def test_the_text_equals_plain_decoding(drafted: Any, expected: str) -> None:
    before = num_drafts(drafted)
    assert text_of(drafted.complete(**LONG)) == expected
    assert num_drafts(drafted) > before
    assert faults(drafted) == 0


def await_drafts(app: Any, num_before: float) -> None:
    """Drafts may be late for all of a request on a busy machine, or their budget be zero."""
    wait_until(lambda: bool(app.complete(**LONG)) and num_drafts(app) > num_before, REPLACEMENT_S)


def replace(app: Any, options: dict[str, Any]) -> Any:
    return app.http.post("/admin/drafter", json=options, headers=AUTHORIZED)


def drafter_of(reply: Any) -> Any:
    """The drafter's report of the only replica."""
    assert reply.status_code == 200, reply.text
    (report,) = reply.json()["replicas"].values()
    return report


@contextmanager
def requests_running(app: Any, expected: str) -> Iterator[None]:
    """A client sends one request after the other. None fails, all texts are the expected one, and no process stays."""
    faults_before, drafters_before, stopped = faults(app), num_drafters(), threading.Event()

    def send() -> set[str]:
        texts = set()
        while not stopped.is_set():
            texts.add(text_of(app.complete(**LONG)))
            time.sleep(0.3)  # the new drafters need time to start
        return texts

    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send)
        try:
            yield
        finally:
            stopped.set()
        assert sender.result() == {expected}
    wait_until(lambda: num_drafters() == drafters_before, REPLACEMENT_S)  # the old ones end after their dismissal
    assert faults(app) == faults_before


def test_drafters_are_added_promoted_and_dropped_while_requests_run(drafted: Any, expected: str) -> None:
    """From a single head to two drafters, the new one as a shadow first, and back to one, which is the new one."""

    def used(**speculative: Any) -> list[str]:
        reply = drafted.complete(**LONG | {"max_tokens": 40, "speculative": speculative})
        assert is_start(text_of(reply), expected)
        return list(reply["usage"]["speculative"]["drafters"])

    added = {"action": "add", "drafter": {"name": "copy", "algorithm": "NGRAM"}, "shadow_share": 1.0}
    with requests_running(drafted, expected):
        assert set(drafter_of(replace(drafted, added))["drafters"]) == {"eagle3", "copy"}
        assert (used(), used(drafter="copy")) == (["eagle3"], ["copy"])
        deadline = time.monotonic() + REPLACEMENT_S
        while not metric(drafted, 'specray_shadow_trees_total{drafter="copy"'):
            assert time.monotonic() < deadline
            used()
        report = drafter_of(replace(drafted, {"action": "promote", "name": "copy"}))["drafters"]["copy"]
        assert (report["is_default"], report["is_shadow"]) == (True, False)
        assert report["shadow_accept_length"] >= 1
        assert used() == ["copy"]
        assert set(drafter_of(replace(drafted, {"action": "drop", "name": "eagle3"}))["drafters"]) == {"copy"}
        assert used() == ["copy"]


def test_drafters_are_replaced_while_requests_run(drafted: Any, expected: str, eagle: dict[str, Any]) -> None:
    deeper = eagle | {"num_steps": 5, "eagle_topk": 3, "num_draft_tokens": 16}
    with requests_running(drafted, expected):
        for options in ({"algorithm": None}, deeper):
            drafter = drafter_of(replace(drafted, options))
            assert (drafter["state"], drafter["loading"]) == ("ready" if options["algorithm"] else "off", None)
            assert {name: drafter["speculative"][name] for name in options} == options
            before = num_drafts(drafted)
            if options["algorithm"]:
                await_drafts(drafted, before)
            else:
                drafted.complete(**LONG)
                assert num_drafts(drafted) == before
    assert drafted.http.get("/server_info").json()["max_draft_tokens"] == 15
    assert drafter["restarts"] == 0


def test_a_drafter_that_does_not_load_changes_nothing(drafted: Any, eagle: dict[str, Any], tmp_path: Path) -> None:
    before = drafter_of(drafted.http.get("/admin/drafter", headers=AUTHORIZED))
    reply = replace(drafted, eagle | {"draft_model_path": str(tmp_path)})
    assert reply.status_code == 400
    assert str(tmp_path) in reply.json()["error"]["message"]
    after = drafter_of(drafted.http.get("/admin/drafter", headers=AUTHORIZED))
    assert after | {"accept_length": None} == before | {"accept_length": None}
    await_drafts(drafted, num_drafts(drafted))


def test_a_frozen_drafter_is_replaced_and_the_text_stays(drafted: Any, expected: str) -> None:
    """tests/chaos kills drafters."""
    faults_before = faults(drafted)
    with ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(drafted.complete, **LONG) for _ in range(4)]
        time.sleep(0.3)
        for process in own_processes("ray::DraftActor"):
            os.kill(process, signal.SIGSTOP)
        assert [text_of(reply.result()) for reply in replies] == [expected] * 4
    num_before = num_drafts(drafted)
    short = LONG | {"max_tokens": 8}
    wait_until(
        lambda: is_start(text_of(drafted.complete(**short)), expected) and num_drafts(drafted) > num_before,
        REPLACEMENT_S,
    )
    assert faults(drafted) > faults_before
    assert text_of(drafted.complete(**LONG)) == expected
