"""Replayed requests have the accept histogram that they had live, step for step, with every drafting method."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from specray.bench.replay import Arm, known_costs, predicted_speeds, yaml_block
from specray.bench.teacher_forcing import Replayed, Replayer, num_accepted
from specray.cli import main as cli
from specray.config import SpeculativeConfig, with_values
from specray.engine.draft_budget.costs import StepCosts, StepShape
from specray.engine.draft_budget.store import CostStore
from specray.engine.request_log import LoggedRequest
from specray.grammar import GrammarSpec
from specray.llm import LLM
from specray.outputs import FinishReason
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import TreeLists
from tests.support.engine import make_llm
from tests.support.methods import METHODS

PROMPTS = [[0, 9, 8, 7, 6, 5, 4, 30, 31, 32, 9, 8, 7, 6, 5, 4, 30, 31][: 5 + 2 * i] for i in range(6)]
OPTIONS: list[dict[str, object]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 8, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.3, "banned_sequences": [[9], [8, 7]]},
    {"temperature": 0.0, "allowed_token_ids": [7, 8, 9]},
    {"temperature": 1.0, "stop": ["th", "a"], "stop_token_ids": [12]},
]
PARAMS = [SamplingParams(seed=40 + i, max_tokens=24, **options) for i, options in enumerate(OPTIONS)]  # type: ignore[arg-type]
LOGGED = LoggedRequest(
    "a",
    "",
    "none",
    FinishReason.LENGTH,
    PARAMS[0],
    2,
    3,
    [0, 0],
    [0, 0],
    prompt_token_ids=[3, 4],
    output_token_ids=[5] * 3,
)
# The scheduler plans one step at a time, so that it knows how long a text is when it limits a tree.
ENGINE = {"disable_overlap_schedule": True, "chunked_prefill_size": 7, "page_size": 4, "max_running_requests": 3}


def record(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[LoggedRequest]:
    """Generate one request after the other, and return what a log has of them."""
    logged: list[LoggedRequest] = []
    llm.engine.on_finish = lambda request: logged.append(LoggedRequest.of(request, llm.engine.drafter_name))
    for prompt, options in zip(prompts, params, strict=True):
        llm.generate([prompt], options)
    return logged


@pytest.fixture(scope="module")
def plain(toy: Path) -> Iterator[LLM]:
    with make_llm(toy, **ENGINE) as llm:
        yield llm


@pytest.mark.parametrize("method", ["EAGLE3", "EAGLE-map", "MTP-stack", "STANDALONE-tree", "PARALLEL", "NGRAM"])
def test_a_replay_equals_the_live_steps(method: str, plain: LLM, toy: Path, tmp_path: Path) -> None:
    speculative = METHODS[method](toy, tmp_path)
    live = record(plain.with_speculative(speculative), PROMPTS, PARAMS)
    of_plain_text = record(plain, PROMPTS, PARAMS)
    assert [each.output_token_ids for each in live] == [each.output_token_ids for each in of_plain_text]
    assert all(not any(each.num_drafts) for each in of_plain_text)
    replayer, replayed = Replayer(plain.with_speculative(speculative)), Replayed()
    for each in of_plain_text:
        replayer.replay(each, replayed)
    assert replayed.num_drafts == [count for each in live for count in each.num_drafts]
    assert replayed.num_accepted == [count for each in live for count in each.num_accepted]
    assert sum(replayed.num_accepted) > 0


@pytest.mark.parametrize(
    ("text", "expected"), [([7, 8, 9], 2), ([7, 5], 1), ([4], 1), ([4, 6, 1, 1], 2), ([9], 0), ([], 0)]
)
def test_the_longest_path_of_a_tree_is_accepted(text: list[int], expected: int) -> None:
    tree = TreeLists([3, 7, 4, 7, 8, 6, 5], [-1, 0, 0, 0, 1, 2, 3])  # 5 is below the second 7, which never counts
    assert num_accepted(tree, text) == expected


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("redacted", {"prompt_token_ids": [], "output_token_ids": []}),
        ("its text depended on the drafts", {"is_lossy": True}),
        ("a grammar changed its trees", {"params": SamplingParams(seed=1, grammar=GrammarSpec("json_object"))}),
        ("of another model", {"output_token_ids": [64]}),
        ("longer than the KV pool or the context", {"output_token_ids": [5] * 300}),
    ],
)
def test_a_request_that_cannot_be_replayed_is_left_out(reason: str, changes: dict[str, Any], plain: LLM) -> None:
    replayer = Replayer(plain.with_speculative(SpeculativeConfig(algorithm="NGRAM")))
    assert replayer.unusable(LOGGED) is None
    assert replayer.unusable(replace(LOGGED, **changes)) == reason


def test_speeds_follow_from_the_costs_of_a_server_with_the_same_drafter(plain: LLM, toy: Path) -> None:
    speculative = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=5, budget="auto")
    served, capacity = with_values(plain.config, speculative=speculative), plain.engine.capacity
    assert known_costs(served, speculative, capacity) is None
    costs = StepCosts()
    costs.observe(StepShape(1, 0, 0), 0.010, 0.002)
    costs.observe(StepShape(1, 4, 4), 0.014, 0.006)
    store = CostStore.of(served, capacity)
    store.save(costs)
    store.wait()
    other_tree = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=9)
    assert known_costs(served, SpeculativeConfig(algorithm="EAGLE3", draft_model_path=str(toy)), capacity) is None
    for method in (speculative, other_tree):
        found = known_costs(served, method, capacity)
        speeds = predicted_speeds(found, Replayed([4, 4], [1, 2]), [1])
        assert speeds == {1: pytest.approx(2.5 / 0.020)}
    assert "125.0 tokens/s at batch size 1" in yaml_block(Arm("ngram:5", speculative, Replayed([4], [1]), speeds))


def test_the_command_prints_arms_by_accept_length_and_a_block_for_a_configuration(
    plain: LLM, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "log.jsonl", tmp_path / "out" / "replay.json"
    logged = [*record(plain, PROMPTS[:3], PARAMS[:3]), replace(LOGGED, is_lossy=True)]
    path.write_text("".join(json.dumps(each.to_json()) + "\n" for each in logged) + '{"request_id": "cut o')
    arguments = ["replay", str(path), "--arms", "plain,ngram:3,ngram:8", "--model", str(toy), "--dtype", "float32"]
    assert cli.main([*arguments, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    arms = json.loads(out.read_text())["arms"]
    assert list(arms) == sorted(arms, key=lambda name: -arms[name]["accept_length"])
    assert "1 of 4 requests are left out: its text depended on the drafts" in printed
    block = yaml.safe_load(printed[printed.index("# specray replay") : printed.index("\n\n", printed.index("# spec"))])
    assert SpeculativeConfig(**block["speculative"]).num_draft_tokens in (3, 8)
    assert cli.main(["replay", str(path), "--arms", "plain", "--model", str(toy)]) == 2
    path.write_text('{"request_id": 3}\n')
    assert cli.main(arguments) == 2
    assert "log.jsonl, line 1" in capsys.readouterr().err
