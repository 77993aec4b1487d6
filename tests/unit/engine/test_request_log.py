"""The request log: what a line has, who is logged, how large it grows, and that several engines share a folder."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specray.config import EngineConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.request_log import TEXT_OPTIONS, TEXTS, LoggedRequest, RequestLog, read_log
from specray.errors import ConfigError
from specray.grammar import GrammarSpec
from specray.outputs import FinishReason
from specray.sampling_params import SamplingParams
from specray.server.config import ServerConfig
from tests.unit.engine.fake_executor import FakeExecutor, continuation, letters_tokenizer, run_to_end

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(seed=1, max_tokens=9, temperature=0.5, ignore_eos=True, logit_bias={4: 1.5}, stop=["never"])


def run_logged(log: RequestLog, *requests: EngineRequest) -> list[LoggedRequest]:
    """Run requests with trees of four drafts of which two, then one are accepted, and close the log; returns it."""
    config = EngineConfig(page_size=4)
    executor = FakeExecutor(config, 200, 5, [(4, 2), (4, 1)])
    executor.max_lengths = {request.params.seed or 0: len(PROMPT) + 9 for request in requests}
    engine = Engine(config, executor, letters_tokenizer())
    engine.requests.on_finish = lambda request: log.add(request, engine.drafter.name)
    for request in requests:
        engine.add_request(request)
    run_to_end(engine)
    log.close()
    return list(read_log(log.path))


def request(seed: int, tenant: str = "", **options: Any) -> EngineRequest:
    return EngineRequest(f"r{seed}", PROMPT, replace(PARAMS, seed=seed), tenant=tenant, **options)


def test_a_line_has_what_a_replay_needs(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log", ["*"], 2**20, is_redacted=False)
    (logged,) = run_logged(log, request(1, cache_salt="salt", predicted_token_ids=[8]))
    assert logged.prompt_token_ids == PROMPT
    assert logged.params == PARAMS
    assert (logged.cache_salt, logged.predicted_token_ids, logged.drafter) == ("salt", [8], "none")
    assert logged.finish_reason is FinishReason.LENGTH
    assert len(logged.output_token_ids) == logged.num_output_tokens == 9
    assert logged.output_token_ids == continuation_without_end(9)
    assert logged.num_accepted == [2, 1, 2]
    assert log.path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700


def continuation_without_end(num_tokens: int) -> list[int]:
    """The target's tokens, which go on after its end token."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + num_tokens:
        tokens += continuation(tokens, 1)
    return tokens[len(PROMPT) :]


def test_options_of_every_type_survive(tmp_path: Path) -> None:
    params = SamplingParams(seed=1, max_tokens=2, banned_sequences=[[4, 5]], grammar=GrammarSpec("regex", "a+"))
    logged = LoggedRequest("a", "t", "none", FinishReason.STOP, params, 1, 1, [], [], False, [3], [4], [])
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(logged.to_json()) + "\n")
    assert list(read_log(path)) == [logged]


def test_a_redacted_log_has_no_text(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, ["*"], 2**20, is_redacted=True)
    (logged,) = run_logged(log, request(1, cache_salt="salt", predicted_token_ids=[8]))
    (line,) = map(json.loads, log.path.read_text().splitlines())
    assert not TEXTS & line.keys()
    assert not set(TEXT_OPTIONS) & line["params"].keys()
    assert logged.is_redacted
    assert (logged.num_prompt_tokens, logged.num_output_tokens, logged.num_accepted) == (3, 9, [2, 1, 2])


def test_only_complete_requests_of_tenants_that_agreed_are_logged(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, ["ann", "bob"], 2**20, is_redacted=False)
    requests = [request(1, "ann"), request(2, "eve"), request(3), request(4, "bob")]
    requests += [request(5, "bob", timeout_s=0.0), request(6, "ann", is_probe=True)]  # the first ends as `abort`
    assert [each.request_id for each in run_logged(log, *requests)] == ["r1", "r4"]


def test_the_oldest_requests_are_dropped_at_the_size_limit(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, ["*"], 4000, is_redacted=False)
    newest = run_logged(log, *map(request, range(30)))
    older = list(read_log(tmp_path / "engine-0.1.jsonl"))
    assert newest[-1].request_id == "r29"
    assert len(newest) + len(older) < 30
    assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) <= 4000


def test_each_engine_writes_its_own_files_and_a_new_one_continues(tmp_path: Path) -> None:
    first, second = (RequestLog(tmp_path, ["*"], 2**20, is_redacted=False) for _ in range(2))
    assert [log.path.name for log in (first, second)] == ["engine-0.jsonl", "engine-1.jsonl"]
    assert len(run_logged(first, request(1))) == 1
    assert len(run_logged(RequestLog(tmp_path, ["*"], 2**20, is_redacted=False), request(2))) == 2
    second.close()


def test_a_part_of_a_line_is_cut_off_by_the_next_engine(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, ["*"], 2**20, is_redacted=False)
    run_logged(log, request(1))
    with log.path.open("a") as file:
        file.write('{"request_id": "r2", "prompt_token_ids": [' + "5, " * 50_000)
    assert [each.request_id for each in read_log(log.path)] == ["r1"]
    found = run_logged(RequestLog(tmp_path, ["*"], 2**20, is_redacted=False), request(3))
    assert [each.request_id for each in found] == ["r1", "r3"]


def test_a_log_goes_on_once_its_folder_can_be_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = RequestLog(folder, ["*"], 4000, is_redacted=False)
    folder.rename(tmp_path / "moved")  # a new file cannot be begun
    config = EngineConfig(page_size=4)
    for seeds, is_there in ((range(10), False), (range(10, 20), True)):
        if is_there:
            while log._unwritten.qsize() or not log._has_failed:
                time.sleep(0.01)
            (tmp_path / "moved").rename(folder)
        executor = FakeExecutor(config, 200, 5, [(4, 2), (4, 1)])
        executor.max_lengths = {seed: len(PROMPT) + 9 for seed in seeds}
        engine = Engine(config, executor, letters_tokenizer())
        engine.requests.on_finish = lambda request: log.add(request, "none")
        for seed in seeds:
            engine.add_request(request(seed))
        run_to_end(engine)
    log.close()
    assert [each.request_id for each in read_log(log.path)][-1] == "r19"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="request_log"):
        RequestLog(tmp_path / "file", ["*"], 2**20, is_redacted=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_log": "/log"}, "no client has agreed"),
        ({"request_log": "log", "request_log_tenants": ["*"]}, "absolute path"),
        ({"request_log": "/log", "request_log_tenants": ["ann"]}, "without server.api_key_file"),
        ({"request_log_tenants": ["*"]}, "no effect without server.request_log"),
    ],
)
def test_a_log_without_consent_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServerConfig.model_validate(options)
    ServerConfig.model_validate({"request_log": "/log", "request_log_tenants": ["*"]})


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00\n", b"[" * 100_000 + b"\n", b"\n", b'{"output_token_ids": [-5]}\n'], ids=repr
)
def test_a_file_that_is_no_log_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    if content.startswith(b"{"):  # otherwise a whole line
        log = RequestLog(tmp_path / "log", ["*"], 2**20, is_redacted=False)
        (logged,) = run_logged(log, request(1))
        content = json.dumps(logged.to_json() | json.loads(content)).encode() + b"\n"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"log\.jsonl, line 1: "):
        list(read_log(path))
