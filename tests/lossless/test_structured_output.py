"""Structured output: valid, and the same with every drafter, batch, layout and schedule as with plain decoding."""

import json
import re
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specray.config import SpeculativeConfig
from specray.engine.engine_request import EngineRequest
from specray.errors import InvalidRequestError
from specray.grammar import NO_TOKEN_ALLOWED, NO_TOKEN_LEFT, GrammarSpec, as_format, make_grammar
from specray.llm import LLM
from specray.outputs import Completion, FinishReason
from specray.sampling_params import SamplingParams
from specray.step import DraftLimit, RequestResult, StepPlan
from specray.testing.conformance import require_equal
from tests.support.drafters import DRAWS, ScriptedDrafter
from tests.support.engine import make_llm, visible
from tests.support.graph_stand_in import recorded_graphs
from tests.support.json_toy import require_valid, write_json_tokenizer, write_json_toy
from tests.support.methods import KINDS, METHODS
from tests.support.toy import VOCAB_SIZE

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "tag": {"type": "string", "maxLength": 4},
            "age": {"type": "integer", "minimum": 0, "maximum": 999},
            "flag": {"type": "boolean"},
            "none": {"type": "null"},
        },
        "required": ["tag", "age", "flag", "none"],
    },
    {"type": "array", "items": {"enum": ["ab", "ba", 7, None]}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"const": {"a": [1, 2]}}, {"type": "string", "pattern": "^[ab]{1,3}$"}]},
    {
        "$defs": {"node": {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"]}},
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/node"}],
        "items": False,
        "minItems": 2,
    },
]
FLAG = make_grammar("json_schema", {"type": "object", "properties": {"f": {"type": "boolean"}}, "required": ["f"]})
REASONING = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "b"}  # free text up to the first b
GRAMMARS = [
    *(make_grammar("json_schema", schema) for schema in SCHEMAS),
    make_grammar("regex", "[ab]{2}-[0-9]{1,3}"),
    make_grammar("choice", ["true", "null", "al"]),
    make_grammar("ebnf", 'root ::= "{" root? "}"'),
    make_grammar("structural_tag", {"format": {"type": "sequence", "elements": [REASONING, as_format(FLAG)]}}),
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.9, "frequency_penalty": 0.7, "logprobs": 2},
]
PREFIX = [0, 9, 8, 7, 6, 5, 4, 30, 31, 32, 9, 8, 7, 6, 5, 4]
PROMPTS = [[*PREFIX, 40 + index] for index in range(len(GRAMMARS) * len(OPTIONS))]
PARAMS = [
    SamplingParams(seed=seed, max_tokens=60, grammar=grammar, ignore_eos=seed % 2 == 0, **options)
    for seed, (grammar, options) in enumerate((grammar, options) for grammar in GRAMMARS for options in OPTIONS)
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"page_size": 4, "chunked_prefill_size": 4, "max_prefill_tokens": 6},
    "preemption": {"page_size": 4, "max_total_tokens": 128, "max_running_requests": 4},
    "few drafts": {"max_running_requests": 2},
}
# (method, layout); another test compares methods with whole prompts.
CASES = [(None, "whole"), *product([None, "EAGLE3", "NGRAM"], ["chunks", "preemption", "few drafts"])]
FREE = SamplingParams(seed=7, max_tokens=30, temperature=1.0)
ALL = range(len(PARAMS))
ONE_EACH = [grammar * len(OPTIONS) + grammar % len(OPTIONS) for grammar in range(len(GRAMMARS))]  # one request of each


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_json_toy(tmp_path_factory.mktemp("json-toy"))


@pytest.fixture(scope="module")
def plain(toy: Path) -> list[Completion]:
    """One request at a time, without drafts."""
    with make_llm(toy, disable_radix_cache=True) as llm:
        return [llm.generate([prompt], params)[0].choices[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def drafting(method: str, toy: Path, folder: Path) -> SpeculativeConfig:
    """The method's configuration; a draft model gets the target's tokenizer."""
    config = METHODS[method](toy, folder)
    if (folder / "draft").is_dir():
        write_json_tokenizer(folder / "draft")
    return config


def run(llm: LLM, which: Sequence[int] = ALL) -> list[Completion]:
    """Requests, and unconstrained ones among them, with two plans in flight."""
    llm.engine.capacity = llm.engine.capacity._replace(max_plans=2)
    prompts = [prompt for index in which for prompt in (PROMPTS[index], [5, 6])]
    params = [param for index in which for param in (PARAMS[index], FREE)]
    return [generation.choices[0] for generation in llm.generate(prompts, params)]


def assert_matching(outputs: list[Completion]) -> None:
    """All that ended by themselves match their grammar, and nearly all did."""
    ended = [(output, params) for output, params in zip(outputs, PARAMS, strict=True) if output.finish_reason == "stop"]
    assert len(ended) > len(outputs) * 0.8
    for output, params in ended:
        assert params.grammar is not None
        if params.grammar.kind == "json_schema":
            require_valid(output.text, json.loads(params.grammar.text))
        if params.grammar.kind == "regex":
            assert re.fullmatch(params.grammar.text, output.text)
        if params.grammar.kind == "structural_tag":
            require_valid(output.text.partition("b")[2], json.loads(FLAG.text))
        if params.grammar.kind == "choice":
            assert output.text in json.loads(params.grammar.text)
    assert {output.finish_reason for output in outputs} <= {FinishReason.STOP, FinishReason.LENGTH}


def test_plain_output_matches_its_grammar(plain: list[Completion]) -> None:
    assert_matching(plain)


@pytest.mark.parametrize("method", KINDS)
def test_every_way_to_draft_gives_the_plain_output(
    method: str, toy: Path, plain: list[Completion], tmp_path: Path
) -> None:
    with make_llm(toy, speculative=drafting(method, toy, tmp_path)) as llm:
        outputs = run(llm)
    require_equal(outputs[::2], plain)
    assert len({tuple(output.token_ids) for output in outputs[1::2]}) == 1


@pytest.mark.parametrize(("method", "layout"), CASES)
def test_no_layout_changes_the_output(
    method: str | None, layout: str, toy: Path, plain: list[Completion], tmp_path: Path
) -> None:
    options = dict(LAYOUTS[layout])
    if method is not None:
        options["speculative"] = drafting(method, toy, tmp_path)
    which = ALL if method is None else ONE_EACH
    with make_llm(toy, **options) as llm:
        require_equal(run(llm, which)[::2], [plain[index] for index in which])
        preempted = llm.engine.scheduler.slots.num_preemptions
    assert (preempted > 0) == (layout == "preemption")


@pytest.mark.parametrize("method", [None, "EAGLE3", "NGRAM"])
def test_forward_passes_in_graphs_do_not_change_the_output(
    method: str | None, toy: Path, plain: list[Completion], tmp_path: Path
) -> None:
    """Steps with a grammar are verified outside of graphs; forced tokens make trees that have no graph."""
    options = {} if method is None else {"speculative": drafting(method, toy, tmp_path)}
    with recorded_graphs() as graphs, make_llm(toy, max_running_requests=3, **options) as llm:
        require_equal(run(llm, ONE_EACH)[::2], [plain[index] for index in ONE_EACH])
    assert graphs[0].replayed


@pytest.mark.parametrize("draw", DRAWS)
def test_no_drafts_change_the_output(draw: str, toy: Path, plain: list[Completion]) -> None:
    texts = [prompt + completion.token_ids for prompt, completion in zip(PROMPTS, plain, strict=True)]
    with make_llm(toy, ScriptedDrafter(DRAWS[draw], texts)) as llm:
        require_equal(run(llm)[::2], plain)


@pytest.mark.parametrize("limit", [DraftLimit(0, 0), DraftLimit(1, 9), DraftLimit(6, 2)])
def test_forced_tokens_keep_a_requests_draft_limit(
    limit: DraftLimit, toy: Path, plain: list[Completion], tmp_path: Path
) -> None:
    with make_llm(toy, speculative=drafting("EAGLE3", toy, tmp_path)) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, draft_limits=[limit] * len(PROMPTS))
    require_equal([generation.choices[0] for generation in outputs], plain)
    for generation in outputs:
        usage = generation.choices[0].usage
        assert usage is not None
        assert usage.num_draft_tokens <= limit.num_tokens * usage.num_verify_steps
        assert len(usage.accept_histogram) <= 1 + limit.num_steps


@pytest.mark.parametrize("verification", ["rejection", "thresholds"])
@pytest.mark.parametrize("method", ["STANDALONE", "EAGLE3-wide", "NGRAM"])
def test_other_verification_also_matches_the_grammar(method: str, verification: str, toy: Path, tmp_path: Path) -> None:
    """These depend on the drafts, so the text may differ from the plain one."""
    options = {"verification": "rejection"} if verification == "rejection" else {"accept_threshold_single": 0.2}
    with make_llm(toy, speculative=drafting(method, toy, tmp_path).model_copy(update=options)) as llm:
        outputs = run(llm)[::2]
    assert_matching(outputs)


@pytest.mark.parametrize("method", [None, "EAGLE3"])
def test_another_engine_continues_after_the_emitted_tokens(
    method: str | None, toy: Path, plain: list[Completion], tmp_path: Path
) -> None:
    """After a failover, the matcher is brought to where the output was."""
    options = {} if method is None else {"speculative": drafting(method, toy, tmp_path)}
    with make_llm(toy, **options) as llm:
        for index, (prompt, params, expected) in enumerate(zip(PROMPTS, PARAMS, plain, strict=True)):
            emitted = expected.token_ids[: len(expected.token_ids) // 2]
            llm.engine.add_request(EngineRequest(str(index), prompt, params, emitted_token_ids=emitted))
            tokens = list(emitted)
            while llm.engine.has_work:
                tokens += [token for output in llm.engine.step() for token in output.token_ids]
            assert tokens == expected.token_ids


def test_speculation_takes_fewer_steps(toy: Path, tmp_path: Path) -> None:
    """Random heads are hardly ever right here: what is accepted are the forced tokens."""
    with make_llm(toy, speculative=drafting("EAGLE3", toy, tmp_path)) as llm:
        [generation] = llm.generate([PROMPTS[0]], PARAMS[0])
        usage = generation.choices[0].usage
    assert usage is not None
    assert usage.num_verify_steps < 0.7 * usage.num_completion_tokens


@pytest.mark.parametrize("max_plans", [1, 2])
@pytest.mark.parametrize("method", [None, "EAGLE3"])
def test_a_request_waits_until_its_grammar_is_compiled(
    method: str | None, max_plans: int, toy: Path, plain: list[Completion], tmp_path: Path
) -> None:
    """Without holding up the others. Here it is compiled while they run, because `LLM.generate` is not used."""
    options = {} if method is None else {"speculative": drafting(method, toy, tmp_path)}
    with make_llm(toy, page_size=4, **options) as llm:
        engine, deferred = llm.engine, 0
        engine.capacity = engine.capacity._replace(max_plans=max_plans)
        grammars = llm._executor.worker.grammars
        defer, start = grammars.defer, grammars.compilation.start
        held: list[tuple[Future[Any], Future[Any]]] = []

        def start_held(spec: GrammarSpec) -> "Future[Any]":
            held.append((Future(), start(spec)))
            return held[-1][0]

        def counted(plan: StepPlan) -> tuple[StepPlan, dict[int, RequestResult]]:
            """Grammars are ready once a step went without them."""
            nonlocal deferred
            ready, waiting = defer(plan)
            deferred += len(waiting)
            while waiting and held:
                shown, compiled = held.pop()
                shown.set_result(compiled.result())
            return ready, waiting

        grammars.defer = counted  # type: ignore[method-assign]
        grammars.compilation.start = start_held  # type: ignore[method-assign]
        engine.add_request(EngineRequest("free", [5, 6], FREE))
        for index in range(3):
            engine.add_request(EngineRequest(str(index), PROMPTS[index], PARAMS[index]))
        tokens: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert [tokens[str(index)] for index in range(3)] == [plain[index].token_ids for index in range(3)]
    assert deferred


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (
            make_grammar("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}),
            "no integer lies between its bounds",
        ),
        (make_grammar("json_schema", {"enum": []}), "'enum' is \\[\\], not a list"),
        (make_grammar("json_schema", {"type": "prose"}), "json_schema cannot be compiled"),
        (make_grammar("regex", "(a"), "unclosed group"),
        (make_grammar("ebnf", "root ::= root"), "no finite text matches: the rule 'root' requires itself"),
        (make_grammar("ebnf", "root ::= other"), "not defined"),
        (make_grammar("structural_tag", {"format": {"type": "poem"}}), "structural tag cannot be compiled at format"),
    ],
)
def test_a_grammar_without_output_is_refused_before_anything_runs(
    grammar: GrammarSpec, message: str, toy: Path
) -> None:
    with make_llm(toy) as llm, pytest.raises(InvalidRequestError, match=message) as caught:
        llm.generate([[5]], SamplingParams(grammar=grammar))
    assert "/" not in str(caught.value)


def test_a_text_that_the_vocabulary_cannot_spell_ends_with_an_error(toy: Path) -> None:
    with make_llm(toy) as llm, pytest.raises(Exception, match=NO_TOKEN_ALLOWED):
        llm.generate([[5]], SamplingParams(grammar=make_grammar("regex", "aQ")))


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [40], "grammar": GRAMMARS[0]},
        {"banned_sequences": [[token] for token in range(VOCAB_SIZE)], "grammar": GRAMMARS[0]},
        {"banned_sequences": [[1]], "grammar": make_grammar("regex", "a")},  # the end token, once it is complete
    ],
)
@pytest.mark.parametrize("draw", ["empty", "random"])
def test_options_that_leave_no_token_are_the_callers_error(options: dict[str, Any], draw: str, toy: Path) -> None:
    with make_llm(toy, ScriptedDrafter(DRAWS[draw])) as llm:
        [before] = llm.generate([PROMPTS[0]], SamplingParams(seed=0, max_tokens=5))
        for temperature in (0.0, 1.0):
            with pytest.raises(InvalidRequestError, match="no token is left to sample: allowed_token_ids") as caught:
                llm.generate([PROMPTS[0]], SamplingParams(seed=0, temperature=temperature, **options))
            assert NO_TOKEN_LEFT in str(caught.value)
        [after] = llm.generate([PROMPTS[0]], SamplingParams(seed=0, max_tokens=5))
    assert visible(after.choices[0]) == visible(before.choices[0])


def test_a_bias_against_all_tokens_forbids_none(toy: Path) -> None:
    bias = dict.fromkeys(range(VOCAB_SIZE), -100.0)
    with make_llm(toy) as llm:
        for grammar in (None, GRAMMARS[0]):
            params = SamplingParams(temperature=0.0, max_tokens=5, grammar=grammar, logit_bias=bias)
            [generation] = llm.generate([PROMPTS[0]], params)
            assert len(generation.choices[0].token_ids) == 5


def test_options_that_contradict_a_grammar_are_refused(toy: Path) -> None:
    grammar = make_grammar("json_object")
    with make_llm(toy) as llm, pytest.raises(InvalidRequestError, match="min_tokens=3 contradicts"):
        llm.generate([[5]], SamplingParams(grammar=grammar, min_tokens=3))


def test_max_tokens_is_the_only_other_end(toy: Path) -> None:
    with make_llm(toy) as llm:
        [generation] = llm.generate([PROMPTS[0]], SamplingParams(seed=0, max_tokens=5, grammar=GRAMMARS[0]))
    assert visible(generation.choices[0])[2] is FinishReason.LENGTH
    assert generation.choices[0].text == '{"tag":'


@pytest.mark.parametrize("method", ["NGRAM", "EAGLE3"])
def test_a_sentencepiece_vocabulary(method: str, stories: Path, tmp_path: Path) -> None:
    """Its encoder puts a space before a text, which the forced tokens must not have."""
    prompts, params = [[1, 400 + index] for index in range(len(SCHEMAS))], []
    for seed, schema in enumerate(SCHEMAS):
        grammar = make_grammar("json_schema", schema)
        params.append(SamplingParams(seed=seed, max_tokens=90, grammar=grammar))
    with make_llm(stories) as llm:
        plain = [generation.choices[0] for generation in llm.generate(prompts, params)]
    with make_llm(stories, speculative=METHODS[method](stories, tmp_path)) as llm:
        drafted = [generation.choices[0] for generation in llm.generate(prompts, params)]
    require_equal(drafted, plain)
    for completion, schema in zip(drafted, SCHEMAS, strict=True):
        require_valid(completion.text, schema)
    assert sum(completion.usage.num_accepted for completion in drafted if completion.usage) > 20
