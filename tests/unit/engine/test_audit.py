"""Audits: an honest engine has no mismatch, one whose text depends on drafts has, and clients notice nothing.

`tests.mutants` runs the test of honest models on a copy of the code with a bug of the verifier.
"""

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random

import pytest
from pydantic import ValidationError

from cluster.config import AppConfig
from specray.config import EngineConfig
from specray.engine.async_engine import AsyncEngine
from specray.engine.audit import MAX_PENDING, MAX_RUNNING, Auditor
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.request import Request
from specray.engine.request_log import RequestLog, read_log
from specray.errors import QueueFullError
from specray.outputs import RequestOutput
from specray.sampling_params import SamplingParams
from specray.step import NewRequest, RequestResult, ScheduledRequest
from tests.support.decoders import write_decoder
from tests.support.drafters import DRAWS, ScriptedDrafter
from tests.support.engine import make_llm
from tests.support.processes import wait_until
from tests.support.toy import write_toy
from tests.unit.engine.fake_executor import (
    FakeExecutor,
    check_block_accounting,
    continuation,
    letters_tokenizer,
    run_to_end,
)

CONFIG = EngineConfig(page_size=4, max_running_requests=4)
MAX_TOKENS = 12
LONG = SamplingParams(seed=2, max_tokens=MAX_TOKENS, ignore_eos=True)
MISMATCHES_FOUND = "audits found mismatches"  # read by `tests.mutants`: a bug that ends the test otherwise is not found


class WrongExecutor(FakeExecutor):
    """A step with drafts emits another last token than the target's."""

    def _run(self, step: ScheduledRequest) -> RequestResult:
        result = super()._run(step)
        if result.num_draft_tokens:
            wrong = (result.token_ids[-1] + 7) % 32
            self.rows[step.slot].tokens[-1] = wrong
            return result._replace(token_ids=[*result.token_ids[:-1], wrong])
        return result


class Audited:
    """An engine of which every finished request is audited."""

    def __init__(
        self, executor: FakeExecutor, share: float = 1.0, keep: RequestLog | None = None, idle_s: float = 0.0
    ) -> None:
        self.executor = executor
        self.engine = Engine(CONFIG, executor, letters_tokenizer())
        self.mismatches: list[tuple[Request, str, list[int]]] = []
        on_mismatch = keep.add if keep else self._note
        self.engine.requests.auditor = Auditor(share, self.engine.stats, Random(0), on_mismatch, idle_s)

    def _note(self, request: Request, drafter: str, token_ids: list[int]) -> None:
        self.mismatches.append((request, drafter, token_ids))

    def add(self, *seeds: int, max_tokens: int = MAX_TOKENS) -> None:
        for seed in seeds:
            params = SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)
            self.executor.max_lengths[seed] = max_tokens + 3
            self.engine.add_request(EngineRequest(f"r{seed}", prompt(seed), params))

    def run(self) -> list[RequestOutput]:
        return run_to_end(self.engine)

    @property
    def num_audits(self) -> float:
        return self.engine.stats.values["specray_audit_requests_total"]

    @property
    def num_mismatches(self) -> float:
        return sum(self.engine.stats.labelled["specray_audit_mismatches_total"].values())


def prompt(seed: int) -> list[int]:
    return [3 + seed % 28, 2, 5]


def drafting(kind: type[FakeExecutor] = FakeExecutor) -> FakeExecutor:
    return kind(CONFIG, 60, 5, [(4, 2), (4, 1), (3, 3)])


def test_clients_and_metrics_notice_nothing() -> None:
    audited, plain = Audited(drafting()), Audited(drafting(), share=0.0)
    for run in (audited, plain):
        run.add(1, 2, 3)
    outputs, expected = audited.run(), plain.run()
    assert (audited.num_audits, audited.num_mismatches, plain.num_audits) == (3, 0, 0)
    assert [(output.request_id, output.token_ids) for output in outputs] == [
        (output.request_id, output.token_ids) for output in expected
    ]
    values, expected_values = (dict(run.engine.stats.values) for run in (audited, plain))
    assert values == expected_values | {"specray_audit_requests_total": 3}
    assert audited.executor.counts.entries[1] == 2
    check_block_accounting(audited.engine)


def test_audits_share_no_cached_prefix() -> None:
    computed: list[int] = []

    class Watched(FakeExecutor):
        def _enter(self, new: NewRequest) -> None:
            computed.append(new.num_computed_tokens)
            super()._enter(new)

    audited, plain = Audited(drafting(Watched)), Audited(drafting(), share=0.0)
    longer = EngineRequest("r2", prompt(1) + true_tokens(prompt(1), 6), LONG)
    for run in (audited, plain):
        run.add(1)
        run.run()
        run.executor.max_lengths[2] = 9 + MAX_TOKENS
        run.engine.add_request(longer)
        run.run()
    assert computed == [0, 0, 8, 0], "the second request begins behind two cached blocks, its audit at the start"
    caches = [run.engine.scheduler.cache for run in (audited, plain)]
    assert caches[0].num_cached == caches[1].num_cached > 0


def test_a_text_that_depends_on_drafts_is_found_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(tmp_path, ["*"], 2**20, is_redacted=False)
    audited = Audited(drafting(WrongExecutor), keep=log)
    audited.add(1, 2)
    outputs = audited.run()
    log.close()
    assert (audited.num_audits, audited.num_mismatches) == (2, 2)
    assert audited.engine.stats.labelled["specray_audit_mismatches_total"] == {"none": 2}
    assert "r1 depended on its drafts" in caplog.text
    for logged in read_log(log.path):
        place = len(logged.plain_token_ids or []) - 1
        assert logged.plain_token_ids == true_tokens(logged.prompt_token_ids, place + 1)
        assert logged.output_token_ids[:place] == (logged.plain_token_ids or [])[:place]
        assert logged.output_token_ids[place] != (logged.plain_token_ids or [])[place]
    assert {output.request_id for output in outputs} == {"r1", "r2"}


def true_tokens(token_ids: Sequence[int], count: int) -> list[int]:
    tokens = list(token_ids)
    for _ in range(count):
        tokens += continuation(tokens, 1)
    return tokens[len(token_ids) :]


def test_an_audit_makes_way_and_continues_later() -> None:
    audited = Audited(drafting())
    audited.add(1)
    engine, auditor = audited.engine, audited.engine.requests.auditor
    assert auditor is not None
    while not any(len(audit.token_ids) >= 3 for audit in auditor.running.values()):
        engine.step()
    audited.add(2)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["r2"]
    engine.update_gauges()
    assert engine.stats.values["specray_num_requests_running"] == 1
    audited.run()
    assert (audited.num_audits, audited.num_mismatches) == (2, 0)
    entered = audited.executor.counts.entries
    assert (entered[1], entered[2]) == (3, 2)  # the first audit began twice


def test_an_audit_takes_no_clients_place() -> None:
    """As many requests are accepted while audits run as in an idle engine."""
    audited, idle = Audited(drafting()), Audited(drafting(), share=0.0)
    audited.add(*range(1, MAX_RUNNING + 1))
    auditor = audited.engine.requests.auditor
    while auditor is None or len(auditor.running) < MAX_RUNNING:
        audited.engine.step()
    assert [request.spec.is_audit for request in audited.engine.scheduler.running] == [True] * MAX_RUNNING
    accepted = [num_accepted(run.engine) for run in (audited, idle)]
    assert accepted == [CONFIG.max_running_requests + CONFIG.max_queued_requests] * 2


def num_accepted(engine: Engine) -> int:
    """Requests until the queue is full."""
    for number in count():
        try:
            engine.add_request(EngineRequest(f"a{number}", prompt(1), LONG))
        except QueueFullError:
            return number
    raise AssertionError


def test_audits_cost_a_busy_server_no_step() -> None:
    """One client sends its next request when the last one has ended."""
    num_steps = []
    for share in (0.0, 1.0):
        audited = Audited(drafting(), share, idle_s=1.0)
        for seed in range(6):
            audited.add(seed)
            audited.run()
        num_steps.append(audited.executor.counts.steps)
    assert num_steps[0] == num_steps[1]
    assert 0.0 < (audited.engine.requests.audit_in_s or 0.0) <= 1.0
    time.sleep(1.0)
    audited.run()
    assert audited.num_audits == 6


def test_a_thread_that_waits_begins_an_audit_by_itself() -> None:
    audited = Audited(drafting(), idle_s=0.05)
    audited.add(1)
    loop = AsyncEngine(audited.engine, lambda _: None)
    loop.start()
    wait_until(lambda: audited.num_audits)
    loop.close()
    assert audited.num_audits == 1


def test_probes_do_not_end_an_audit_and_pending_audits_are_bounded() -> None:
    audited = Audited(drafting())
    audited.add(*range(1, MAX_PENDING + 5))
    engine, auditor = audited.engine, audited.engine.requests.auditor
    assert auditor is not None
    while not auditor.running:
        engine.step()
    running = set(auditor.running)
    audited.executor.max_lengths[0] = 2
    engine.add_request(EngineRequest("p", [4], SamplingParams(seed=0, max_tokens=1, ignore_eos=True), is_probe=True))
    engine.step()
    assert running <= set(auditor.running)
    audited.run()
    assert audited.num_audits == MAX_PENDING


def test_about_the_share_is_audited_and_only_requests_with_drafts() -> None:
    audited = Audited(drafting(), share=0.3)
    for start in range(0, 100, 10):
        audited.add(*range(start, start + 10))
        audited.run()
    assert 15 <= audited.num_audits <= 45
    without = Audited(FakeExecutor(CONFIG, 60))
    without.add(1, 2)
    without.run()
    assert without.num_audits == 0


@pytest.mark.parametrize(("model", "count"), [("llama", 32), ("qwen3_5", 8)])
@pytest.mark.parametrize("kind", ["half-right", "right-last"])
def test_honest_models_have_no_mismatch(model: str, count: int, kind: str, tmp_path: Path) -> None:
    """With drafts of which all or some are right, at temperatures of 0 and above, in batches."""
    write_toy(tmp_path) if model == "llama" else write_decoder(model, tmp_path)
    prompts = [[0, 4 + number % 50, 9, 8] for number in range(count)]
    params = [
        SamplingParams(temperature=number % 3 / 2, seed=number, max_tokens=MAX_TOKENS, ignore_eos=True)
        for number in range(count)
    ]
    with make_llm(tmp_path) as plain:
        known = [each.prompt_token_ids + each.choices[0].token_ids for each in plain.generate(prompts, params)]
    with make_llm(tmp_path, ScriptedDrafter(DRAWS[kind], known), page_size=4) as llm:
        stats = llm.engine.stats
        llm.engine.requests.auditor = Auditor(1.0, stats, Random(0), lambda *_: None, idle_s=0.0)
        for start in range(0, count, 8):
            llm.generate(prompts[start : start + 8], params[start : start + 8])
    assert stats.labelled["specray_audit_mismatches_total"] == {"none": 0}, MISMATCHES_FOUND
    assert stats.values["specray_audit_requests_total"] == count
    assert stats.values["specray_spec_decode_num_accepted_tokens_total"] > count


@pytest.mark.parametrize("options", [{"verification": "rejection"}, {"accept_threshold_single": 0.5}])
def test_an_audit_of_texts_that_depend_on_drafts_is_refused(options: dict[str, object]) -> None:
    config = {"speculative": {"algorithm": "NGRAM", **options}}
    with pytest.raises(ValidationError, match=r"server\.audit"):
        AppConfig.model_validate({**config, "server": {"audit": 0.1}})
    AppConfig.model_validate(config)
