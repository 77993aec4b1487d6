"""From a server's log to a better head: train it, measure it in the shadow, promote it, and take it back."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.engine.reconciler import drafter_report
from cluster.engine.supervisor import DrafterState
from specray.cli.main import main
from specray.config import SpeculativeConfig
from specray.engine.request_log import LoggedRequest, RequestLog
from specray.errors import ConfigError
from specray.llm import LLM
from specray.outputs import FinishReason
from specray.sampling_params import SamplingParams
from specray.server.routing.promotion import decide
from specray.train.batches import AnswerFolder
from specray.train.export import init_head_ids
from specray.train.from_log import add_logged
from specray.train.settings import TrainSettings
from tests.support.engine import make_llm
from tests.support.training_data import write_answers

DRAFT_VOCAB = 256  # of 512
OPENINGS = ("Once upon a time", "One day", "Lily and Tom", "The dog", "A bird", "There was a boy", "Mom said", "In the")
LOGGED = LoggedRequest(
    "a",
    "",
    "none",
    FinishReason.LENGTH,
    SamplingParams(seed=1),
    2,
    3,
    [],
    [],
    prompt_token_ids=[3, 4],
    output_token_ids=[5, 6, 7],
)


def member(name: str, head: Path) -> dict[str, Any]:
    tree = {"num_steps": 2, "eagle_topk": 1, "num_draft_tokens": 3}
    return {"name": name, "algorithm": "EAGLE3", "draft_model_path": str(head), "draft_dtype": "float32", **tree}


def answer(llm: LLM, seed: int, **options: Any) -> list[list[int]]:
    """Texts of all openings."""
    params = [SamplingParams(seed=seed + i, max_tokens=40, **options) for i in range(len(OPENINGS))]
    return [each.choices[0].token_ids for each in llm.generate(list(OPENINGS), params)]


def decided(llm: LLM, now: SpeculativeConfig) -> tuple[SpeculativeConfig, str]:
    """What an ingress does, which asks the only engine for its report."""
    llm.engine.update_gauges()
    report = drafter_report(DrafterState("ready", now, None, 0), None, llm.engine.stats.snapshot())
    return decide(now, {"engine": report})


def logged_answers(llm: LLM, folder: Path) -> tuple[Path, list[list[list[int]]]]:
    """(the log of a server with this engine, the texts)."""
    log = RequestLog(folder, ["*"], 2**24, is_redacted=False)
    llm.engine.requests.on_finish = lambda request: log.add(request, llm.engine.drafter.name)
    texts = [answer(llm, seed, temperature=0.7) for seed in range(0, 80, 10)]
    log.close()
    return log.path, texts


def train(log: Path, run: Path, stories: Path, tokens: int, *options: str) -> Path:
    """The folder of a head that has learnt from a log."""
    command = ["train", "eagle3", "--from-log", str(log), "--answers", str(run / "answers"), "--model", str(stories)]
    command += ["--run", str(run), "--tokens", str(tokens), "--unroll", "1", "--batch-tokens", "256", *options]
    assert main([*command, "--dtype", "float32", "--threads", "1"]) == 0
    return run / "head"


def test_a_head_is_trained_from_a_log_promoted_and_taken_back(stories: Path, tmp_path: Path) -> None:
    with make_llm(stories) as llm:
        log, expected = logged_answers(llm, tmp_path / "plain")
        old = train(log, tmp_path / "old", stories, 256, "--draft-vocab-size", str(DRAFT_VOCAB))
        log, texts = logged_answers(
            llm.with_speculative(SpeculativeConfig.model_validate({"drafters": [member("old", old)]})),
            tmp_path / "drafted",
        )
        assert texts == expected
        new = train(log, tmp_path / "new", stories, 8000, "--init-head", str(old))
        assert torch.equal(draft_ids(new), draft_ids(old)), "a head that goes on keeps its vocabulary"

        both: dict[str, Any] = {"drafters": [member("old", old), member("new", new)]}
        both["shadow"] = {"drafter": "new", "share": 1.0, "promotes": True}
        shadowed = SpeculativeConfig.model_validate(both)
        served = llm.with_speculative(shadowed)
        assert decided(served, shadowed) == (shadowed, "")
        assert [answer(served, seed, temperature=0.7) for seed in range(0, 80, 10)] == expected
        promoted, reason = decided(served, shadowed)
        assert (promoted.default_drafter, promoted.shadow.drafter) == ("new", "old")
        assert "its accept length is" in reason
        served.engine.drafter.replace(promoted, served.engine.scheduler.drafts.max_draft_tokens)
        assert decided(served, promoted) == (promoted, "")

        foreign = sorted(set(range(3, 512)) - set(draft_ids(new).tolist()))  # another subject: nothing is accepted
        for seed in range(0, 40, 10):
            answer(served, seed, allowed_token_ids=foreign)
        taken_back, reason = decided(served, promoted)
        assert (taken_back.default_drafter, taken_back.shadow.promotes) == ("old", False)
        assert reason == "the acceptance of new has collapsed"


def draft_ids(head: Path) -> Tensor:
    ids = init_head_ids(TrainSettings("eagle3", 1, init_head=str(head)))
    assert ids is not None
    return ids


def test_a_folder_grows_with_the_logs_and_leaves_out_what_has_no_text(stories: Path, tmp_path: Path) -> None:
    lines = [LOGGED.to_json(), LOGGED.redacted(), replace(LOGGED, is_lossy=True).to_json()]
    log, answers = tmp_path / "log.jsonl", tmp_path / "answers"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"request_id": "cut o')
    add_logged([log], answers, str(stories))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(replace(LOGGED, request_id="b").to_json()) + "\n")
    add_logged([log, other], answers, str(stories))
    add_logged([log, other], answers, str(stories))
    assert AnswerFolder(answers).size() == {"sequences": 2, "tokens": 10}
    other.write_text(json.dumps(replace(LOGGED, output_token_ids=[512, 3]).to_json()) + "\n")
    with pytest.raises(ConfigError, match="has the token 512"):
        add_logged([other], answers, str(stories))
    log.write_text(json.dumps(LOGGED.redacted()) + "\n")
    new = tmp_path / "new"
    with pytest.raises(ConfigError, match="none of 1 logged requests has a text to learn from"):
        add_logged([log], new, str(stories))
    with pytest.raises(ConfigError, match="has the token 512"):
        add_logged([other], new, str(stories))
    other.write_text("")
    with pytest.raises(ConfigError, match=re.escape(f"{other}: no request is logged there")):
        add_logged([other], new, str(stories))
    with pytest.raises(FileNotFoundError):
        add_logged([tmp_path / "typo.jsonl"], new, str(stories))
    assert not new.exists(), "a refused command leaves no folder behind"
    with pytest.raises(ConfigError, match="answers of another source or model"):
        add_logged([log], write_answers(tmp_path / "made"), str(stories))
