"""Replayed requests have the accept histogram that they had live, step for step, with every drafting method."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from specray.bench.replay import predicted_speeds
from specray.bench.step_costs import measure_costs
from specray.bench.teacher_forcing import Replayed, Replayer, num_accepted, unusable
from specray.bench.variants import BenchRequest, EngineVariant, Run
from specray.cli import main as cli
from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.draft_budget.costs import StepCosts, StepShape
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
    llm.engine.requests.on_finish = lambda request: logged.append(LoggedRequest.of(request, llm.engine.drafter.name))
    for prompt, options in zip(prompts, params, strict=True):
        llm.generate([prompt], options)
    return logged


@pytest.fixture(scope="module")
def plain(toy: Path) -> Iterator[LLM]:
    with make_llm(toy, **ENGINE) as llm:
        yield llm


@pytest.mark.parametrize(
    "method", ["EAGLE3", "EAGLE-map", "MTP-stack", "STANDALONE-tree", "PARALLEL", "NGRAM", "EAGLE3-merged"]
)
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
        ("with a text that depended on the drafts", {"is_lossy": True}),
        ("with a grammar", {"params": SamplingParams(seed=1, grammar=GrammarSpec("json_object"))}),
        ("of another model", {"output_token_ids": [64]}),
        ("longer than the KV pool or the context", {"output_token_ids": [5] * 300}),
    ],
)
def test_a_request_that_cannot_be_replayed_is_left_out(reason: str, changes: dict[str, Any], plain: LLM) -> None:
    assert unusable(LOGGED, plain.engine) is None
    assert unusable(replace(LOGGED, **changes), plain.engine) == reason


def test_speeds_follow_from_the_costs_of_steps() -> None:
    costs = StepCosts()
    costs.observe(StepShape(1, 0, 0), 0.010, 0.002)
    costs.observe(StepShape(1, 4, 4), 0.014, 0.006)
    assert predicted_speeds(costs, Replayed([4, 4], [1, 2]), [1]) == {1: pytest.approx(2.5 / 0.020)}


def test_a_step_costs_what_its_own_trees_cost() -> None:
    """And not what a tree of the mean size costs, or the largest: many of an n-gram drafter's trees are empty."""
    costs = StepCosts()
    for num_drafts, target, rest in ((0, 0.010, 0.001), (1, 0.018, 0.004), (2, 0.019, 0.005), (4, 0.020, 0.006)):
        costs.observe(StepShape(1, num_drafts, num_drafts), target, rest)
    one, two = predicted_speeds(costs, Replayed([0, 0, 0, 4], [0, 0, 0, 2]), [1, 2]).values()
    assert one == pytest.approx(1.5 / ((3 * 0.011 + 0.026) / 4))
    pairs = [costs.seconds(StepShape(2, sum(pair), max(pair))) for pair in ((0, 0), (0, 4), (0, 0), (4, 0))]
    assert two == pytest.approx(2 * 1.5 / (sum(pairs) / 4))


def test_costs_are_those_of_whole_trees_at_each_batch_size(plain: LLM, toy: Path, tmp_path: Path) -> None:
    engines = {"plain": plain.with_speculative(SpeculativeConfig())}
    engines["tree"] = plain.with_speculative(METHODS["STANDALONE-tree"](toy, tmp_path))
    long = replace(LOGGED, prompt_token_ids=[5] * 250, num_prompt_tokens=250)
    costs = measure_costs(engines, [replace(LOGGED, params=replace(PARAMS[5], logprobs=1)), long], [1, 3])
    most = engines["tree"].engine.capacity.max_draft_tokens
    for size in (1, 3):
        measured = costs["tree"].to_json()["target"]
        assert size * (1 + most) in [count for count, *_ in measured]
        assert size in [count for count, *_ in costs["plain"].to_json()["target"]]
        assert costs["tree"].seconds(StepShape(size, size * most, most)) > 0


def test_costs_are_measured_in_the_middle_of_requests_of_all_lengths(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of the first logged request alone made predictions at one request a tenth too slow."""
    lengths = []
    run = EngineVariant.run

    def counted(self: EngineVariant, requests: Sequence[BenchRequest], *rest: Any) -> Run:
        lengths.extend(len(each.token_ids) for each in requests)
        return run(self, requests, *rest)

    monkeypatch.setattr(EngineVariant, "run", counted)
    logged = [
        replace(LOGGED, prompt_token_ids=[5] * n, num_prompt_tokens=n, output_token_ids=[6] * 8, num_output_tokens=8)
        for n in (40, 10, 30, 20)
    ]
    measure_costs({"plain": plain.with_speculative(SpeculativeConfig())}, logged, [1])
    assert lengths == [14, 24, 34, 44]


def test_the_command_prints_arms_by_speed_and_a_block_for_a_configuration(
    plain: LLM, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "log.jsonl", tmp_path / "out" / "replay.json"
    logged = [*record(plain, PROMPTS[:3], PARAMS[:3]), replace(LOGGED, is_lossy=True)]
    path.write_text("".join(json.dumps(each.to_json()) + "\n" for each in logged) + '{"request_id": "cut o')
    arguments = ["replay", str(path), "--arms", "plain,ngram:3,ngram:8", "--model", str(toy), "--dtype", "float32"]
    pytest.importorskip("matplotlib")
    assert cli.main([*arguments, "--json", str(out), "--plot", str(tmp_path / "out" / "replay.png")]) == 0
    assert (tmp_path / "out" / "replay.png").stat().st_size > 0
    printed = capsys.readouterr().out
    arms = json.loads(out.read_text())["arms"]
    means = {name: arm["tokens_per_s"]["1"] * arm["tokens_per_s"]["8"] for name, arm in arms.items()}
    assert list(arms) == sorted(means, key=lambda name: -means[name])
    assert "1 requests are left out: with a text that depended on the drafts" in printed
    block = yaml.safe_load(printed[printed.index("# specray replay") : printed.index("\n\n", printed.index("# spec"))])
    assert SpeculativeConfig(**block["speculative"]).num_draft_tokens in (None, 3, 8)
    assert cli.main(["replay", str(path), "--arms", "plain", "--model", str(toy)]) == 2
    path.write_text('{"request_id": 3}\n')
    assert cli.main(arguments) == 2
    assert "log.jsonl, line 1" in capsys.readouterr().err
    path.write_text("")
    assert cli.main(arguments) == 2
    assert f"{path}: no request is logged there; name the engine-N.jsonl" in capsys.readouterr().err


def test_tune_chooses_the_best_tree_for_a_log(
    plain: LLM, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Costs are scripted: each draft makes a step longer by a tenth."""

    def scripted(engines: Mapping[str, LLM], *_: Any, **__: Any) -> dict[str, StepCosts]:
        costs = StepCosts()
        for size in (1, 2):
            for drafts in (0, 31):
                costs.observe(StepShape(size, size * drafts, drafts), 0.010 + 0.001 * drafts, 0.0)
        return dict.fromkeys(engines, costs)

    monkeypatch.setattr("specray.bench.replay.measure_costs", scripted)
    logged, path = record(plain, PROMPTS[:4], [PARAMS[0]] * 4), tmp_path / "log.jsonl"
    lines = [*(each.to_json() for each in logged), logged[0].redacted()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"speculative": {"algorithm": "NGRAM"}}))
    arguments = ["--model", str(toy), "--dtype", "float32", "--config", str(config), "--batch-sizes", "1,2"]
    out = tmp_path / "tuned"
    assert cli.main(["tune", "--replay", str(path), *arguments, "--candidates", "4,32", "--out", str(out)]) == 0
    document = json.loads((out / "tune.json").read_text())
    assert document["plain_tokens_per_s"] == {"1": pytest.approx(100.0), "2": pytest.approx(200.0)}
    for each in document["candidates"]:
        live, tree = Replayed(), SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=int(each["tree"]))
        replayer = Replayer(plain.with_speculative(tree))
        for request in logged:
            replayer.replay(request, live)
        assert each["accept_lengths"] == [live.accept_length]
        assert each["tokens_per_s"]["2"] == [predicted_speeds(scripted({"": plain})[""], live, [2])[2]]
    best = max(document["candidates"], key=lambda each: each["score"])
    block = yaml.safe_load((out / "speculative.yaml").read_text())
    assert EngineConfig.model_validate(block).speculative.num_draft_tokens == int(best["tree"])
    assert "1 requests are left out: redacted" in capsys.readouterr().out
    assert (out / "tune.png").is_file()
    assert cli.main(["tune", "--replay", str(tmp_path / "none.jsonl"), *arguments]) == 2
    path.write_text(json.dumps(logged[0].redacted()) + "\n")
    assert cli.main(["tune", "--replay", str(path), *arguments]) == 2
    assert "no step of 1 logged requests can be replayed: 1 redacted" in capsys.readouterr().err
