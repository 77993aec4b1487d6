"""An engine arm answers like `LLM.generate`, in order, and measures what it says; on the small trained model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from specray.bench.arms import EngineArm, Job, parse_method, target_of
from specray.bench.floor import Floor
from specray.bench.transformers_arm import TransformersArm
from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.llm import LLM
from specray.sampling_params import SamplingParams

PROMPTS = [[1, 403, 407, 261, 378], [1, 410, 471], [1, 291, 435, 330, 285], [1, 403]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, seed=0)
JOBS = [Job(prompt, PARAMS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def llm(stories: Path) -> Iterator[LLM]:
    with LLM(model=str(stories), dtype="float32", max_total_tokens=1024) as loaded:
        yield loaded


@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_arm_answers_like_generate_in_order(llm: LLM, concurrency: int) -> None:
    run = EngineArm("plain", llm).run(JOBS, concurrency, "")
    expected = [generation.choices[0].token_ids for generation in llm.generate(PROMPTS, PARAMS)]
    assert [reply.token_ids for reply in run.replies] == expected


def test_times_add_up(llm: LLM) -> None:
    run = EngineArm("plain", llm).run(JOBS[:2], 1, "")
    assert all(0 < reply.ttft < reply.seconds < run.seconds for reply in run.replies)
    assert all(0 <= share < 1 for share in run.host_shares)
    assert run.tokens_per_s == pytest.approx(24 / run.seconds)


def test_two_arms_share_the_weights(llm: LLM) -> None:
    other = llm.with_speculative(SpeculativeConfig(algorithm="NGRAM"))
    assert target_of(other) is target_of(llm)
    plain, ngram = EngineArm("plain", llm).run(JOBS, 1, "a"), EngineArm("ngram", other).run(JOBS, 1, "a")
    assert [reply.token_ids for reply in plain.replies] == [reply.token_ids for reply in ngram.replies]


def test_the_yardstick_answers_the_same(llm: LLM, stories: Path) -> None:
    weight = target_of(llm).embedding.weight
    arm = TransformersArm(stories, weight.dtype, weight.device, llm.engine.capacity.eos_token_ids)
    replies = arm.run(JOBS, 1, "").replies
    assert [reply.token_ids for reply in replies] == [
        reply.token_ids for reply in EngineArm("plain", llm).run(JOBS, 1, "b").replies
    ]
    assert all(0 < reply.ttft < reply.seconds for reply in replies)


def test_the_floor_is_below_a_step(llm: LLM) -> None:
    floor = Floor(target_of(llm))
    floor.sample()
    step = EngineArm("plain", llm).run(JOBS, 1, "c").replies[0].tpot
    assert step is not None
    assert 0 < floor.milliseconds < 1000 * step


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", SpeculativeConfig()),
        ("ngram", SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=6)),
        ("ngram:8", SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=8)),
    ],
)
def test_names_of_arms(name: str, expected: SpeculativeConfig) -> None:
    assert parse_method(name, SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=6)) == expected


@pytest.mark.parametrize("name", ["", "ngrm", "plain:3", "ngram:", "ngram:x", "ngram:-1", "ngram:1", "ngram:1000"])
def test_unknown_arms_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"choose|num_draft_tokens"):
        parse_method(name)
