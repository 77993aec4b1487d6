"""An engine variant answers like `LLM.generate`, in order, and measures times, on the small trained model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from specray.bench.transformers_variant import TransformersVariant
from specray.bench.variants import BenchRequest, EngineVariant, parse_method, target_of, tree_name, with_tree
from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.llm import LLM
from specray.sampling_params import SamplingParams

PROMPTS = [[1, 403, 407, 261, 378], [1, 410, 471], [1, 291, 435, 330, 285], [1, 403]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, seed=0)
REQUESTS = [BenchRequest(prompt, PARAMS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def llm(stories: Path) -> Iterator[LLM]:
    with LLM(model=str(stories), dtype="float32", max_total_tokens=1024) as loaded:
        yield loaded


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_variant_answers_like_generate_in_order(llm: LLM, concurrency: int) -> None:
    run = EngineVariant("plain", llm).run(REQUESTS, concurrency, "")
    expected = [generation.choices[0].token_ids for generation in llm.generate(PROMPTS, PARAMS)]
    assert [reply.token_ids for reply in run.replies] == expected


def test_times_add_up(llm: LLM) -> None:
    run = EngineVariant("plain", llm).run(REQUESTS[:2], 1, "")
    assert all(0 < reply.ttft < reply.seconds < run.seconds for reply in run.replies)
    assert all(0 <= share < 1 for share in run.host_shares)
    assert run.tokens_per_s == pytest.approx(24 / run.seconds)


def test_the_full_speed_leaves_out_the_end_of_a_run(llm: LLM) -> None:
    """Once the short request has ended, and no other waits, a single one is left."""
    short = BenchRequest(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=4, seed=0))
    run = EngineVariant("plain", llm).run([REQUESTS[0], short], 2, "")
    assert [len(reply.token_ids) for reply in run.replies] == [12, 4]
    assert run.full_tokens == 8
    assert 0 < run.full_seconds < run.seconds
    assert run.full_tokens_per_s == 8 / run.full_seconds
    assert run.decode_tokens == 6, "without the step that reads the prompts"
    assert 0 < run.decode_seconds < run.full_seconds


def test_two_variants_share_the_weights(llm: LLM) -> None:
    other = llm.with_speculative(SpeculativeConfig(algorithm="NGRAM"))
    assert target_of(other) is target_of(llm)
    plain, ngram = (
        EngineVariant("plain", llm).run(REQUESTS, 1, "a"),
        EngineVariant("ngram", other).run(REQUESTS, 1, "a"),
    )
    assert [reply.token_ids for reply in plain.replies] == [reply.token_ids for reply in ngram.replies]


def test_the_baseline_answers_the_same(llm: LLM, stories: Path) -> None:
    weight = target_of(llm).embedding.weight
    variant = TransformersVariant(stories, weight.dtype, weight.device, llm.engine.capacity.eos_token_ids)
    replies = variant.run(REQUESTS, 1, "").replies
    assert [reply.token_ids for reply in replies] == [
        reply.token_ids for reply in EngineVariant("plain", llm).run(REQUESTS, 1, "b").replies
    ]
    assert all(0 < reply.ttft < reply.seconds for reply in replies)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", SpeculativeConfig()),
        ("ngram", SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=6)),
        ("ngram:8", SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=8)),
    ],
)
def test_names_of_variants(name: str, expected: SpeculativeConfig) -> None:
    configured = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=6)
    assert parse_method(name, EngineConfig(speculative=configured)) == expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle3", {"algorithm": "EAGLE3", "draft_model_path": "smollm2-135m-instruct-eagle3"}),
        ("EAGLE2", {"algorithm": "EAGLE", "draft_model_path": "smollm2-135m-instruct-eagle2"}),
        ("eagle", {"algorithm": "EAGLE", "draft_model_path": "smollm2-135m-instruct-eagle2"}),
        (
            "eagle3:5-4-16",
            {
                "algorithm": "EAGLE3",
                "draft_model_path": "smollm2-135m-instruct-eagle3",
                "num_steps": 5,
                "eagle_topk": 4,
                "num_draft_tokens": 16,
            },
        ),
        ("eagle3@Org/Head", {"algorithm": "EAGLE3", "draft_model_path": "Org/Head"}),
        (
            "eagle2@./my heads/a:1+Map.json:3-1-4",
            {
                "algorithm": "EAGLE",
                "draft_model_path": "./my heads/a:1",
                "token_map": "Map.json",
                "num_steps": 3,
                "eagle_topk": 1,
                "num_draft_tokens": 4,
            },
        ),
        (
            "eagle2+map.pt",
            {"algorithm": "EAGLE", "draft_model_path": "smollm2-135m-instruct-eagle2", "token_map": "map.pt"},
        ),
    ],
)
def test_a_variant_names_head_map_and_tree(name: str, options: dict[str, object]) -> None:
    """A head is quantised as in configs/, which affects speed alone."""
    expected = SpeculativeConfig.model_validate(options | {"draft_model_quantization": "auto"})
    assert parse_method(name) == expected


def test_a_variant_inherits_the_options_of_its_own_method_only() -> None:
    configured = SpeculativeConfig(
        algorithm="EAGLE3",
        draft_model_path="mine",
        draft_model_revision="v2",
        draft_dtype="float32",
        num_steps=3,
        eagle_topk=2,
        num_draft_tokens=6,
    )
    config = EngineConfig(speculative=configured)
    assert parse_method("eagle3", config) == configured
    assert parse_method("eagle3:4-2-8", config) == with_tree(configured, "4-2-8")
    bounded = configured.model_copy(update={"max_step_draft_tokens": 3})
    assert with_tree(bounded, "4-2-8") == with_tree(
        configured, "4-2-8"
    )  # a named tree has no limit on a step's draft tokens
    other = parse_method("eagle3@theirs", config)
    assert (other.draft_model_path, other.draft_model_revision, other.draft_dtype) == ("theirs", None, "float32")
    assert tree_name(other) == "3-2-6"
    assert parse_method("eagle2", config).num_steps is None


def test_only_the_embedded_model_has_default_heads() -> None:
    with pytest.raises(ConfigError, match=r"variant 'eagle3': .*draft_model_path is null"):
        parse_method("eagle3", EngineConfig(model="./another"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "ngrm",
        "plain:3",
        "ngram:",
        "ngram:x",
        "ngram:-1",
        "ngram:1",
        "ngram:1000",
        "eagle4",
        "eagle3@",
        "eagle3+",
        "eagle3:5-4",
        "eagle3:5-4-16-2",
        "eagle3:0-4-16",
        "eagle3:5-99-16",
        "@head",
        "eagle 3",
    ],
)
def test_unknown_variants_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="choose"):
        parse_method(name)


def test_an_incomplete_tree_is_refused_for_a_head() -> None:
    with pytest.raises(ConfigError, match=r"variant 'eagle3:16': .*not set"):
        parse_method("eagle3:16")


@pytest.mark.parametrize(
    ("tree", "name"), [({}, "auto"), ({"num_draft_tokens": 8}, "8"), ({"num_steps": 5, "eagle_topk": 4}, "auto")]
)
def test_an_incomplete_tree_has_a_name(tree: dict[str, int], name: str) -> None:
    assert tree_name(SpeculativeConfig(algorithm="EAGLE3", **tree)) == name
