"""Conformance tests for drafters: each function of CHECKS raises AssertionError if a drafter breaks a rule.

In a test suite of your own, with pytest:

    @pytest.fixture(scope="module")
    def llm() -> Iterator[LLM]:
        with LLM(model="smollm2-135m-instruct", dtype="float32", device="cpu") as llm:
            yield llm

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check: Check, llm: LLM) -> None:
        check(llm, SpeculativeConfig(algorithm="my_package.my_module:MyDrafter"))

Use float32: in other types a near-tie between two tokens can fall either way when batches differ.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from specray.config import SpeculativeConfig
from specray.llm import LLM
from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import ROOT, DraftTree
from specray.spec_decode.drafter import Drafter, DraftFaultError, ProposeContext
from specray.spec_decode.inline_drafts import InlineDrafts
from specray.step import DraftFault, DraftLimit

Check = Callable[[LLM, SpeculativeConfig], None]
Wrap = Callable[[Drafter], Drafter]

NUM_PROMPTS, MAX_TOKENS, MAX_ROWS = 5, 24, 3  # fewer rows than prompts, so that slots are used again
LIMIT = DraftLimit(num_tokens=2, num_steps=1)
MISSED_SHARE = 0.4


def output_equals_plain_decoding(llm: LLM, speculative: SpeculativeConfig) -> None:
    """Greedy and sampled, one request at a time and in a batch, with chunked prompts and a warm prefix cache."""
    expected = _generate(llm, SpeculativeConfig(), max_running_requests=1)
    for options in ({"max_running_requests": 1}, {}, {"chunked_prefill_size": 16}):
        with _engine(llm, speculative, None, **options) as engine:
            for _ in range(2):  # the second time prompts are in the cache
                _assert_same(_answers(engine), expected, f"options {options}")


def trees_are_valid(llm: LLM, speculative: SpeculativeConfig) -> None:
    """One tree per request with the request's last token as root, parents before children, known tokens, and at most
    `max_draft_tokens` drafts; the context is not changed."""
    checked = _generate(llm, speculative, _Checked)
    _assert_same(checked, _generate(llm, SpeculativeConfig()), "with checked trees")


def draft_limits_hold(llm: LLM, speculative: SpeculativeConfig) -> None:
    """Requests that limit their drafts, or allow none, get the same output with at most that many drafts verified."""
    limits = [LIMIT, DraftLimit(0, 0), *[LIMIT] * NUM_PROMPTS][:NUM_PROMPTS]
    with _engine(llm, speculative) as engine:
        answers = _answers(engine, limits)
    _assert_same(answers, _generate(llm, SpeculativeConfig()), "with limits")
    for answer, limit in zip(answers, limits, strict=True):
        assert answer.usage is not None
        most = limit.num_tokens * answer.usage.num_verify_steps
        assert answer.usage.num_draft_tokens <= most, f"{answer.usage.num_draft_tokens} drafts, at most {most} allowed"


def steps_may_be_missed(llm: LLM, speculative: SpeculativeConfig) -> None:
    """A drafter that is not called in every step, or joins late, continues with what it has."""
    expected = _generate(llm, SpeculativeConfig())
    for num_late in (0, 6):
        missing = _generate(llm, speculative, lambda drafter, late=num_late: _Missing(drafter, late))  # type: ignore[misc]
        _assert_same(missing, expected, f"with missed steps, {num_late} of them at the start")


CHECKS: tuple[Check, ...] = (
    output_equals_plain_decoding,
    trees_are_valid,
    draft_limits_hold,
    steps_may_be_missed,
)


class _Wrapped:
    """A Drafter that passes everything on."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.max_draft_tokens = drafter.max_draft_tokens
        self.aux_hidden_state_layers = drafter.aux_hidden_state_layers
        self.reads_next_token = drafter.reads_next_token

    def propose(self, context: ProposeContext) -> DraftTree:
        return self._drafter.propose(context)

    def release(self, slots: Sequence[int]) -> None:
        self._drafter.release(slots)


class _Checked(_Wrapped):
    """Asserts what `Drafter.propose` must return."""

    def propose(self, context: ProposeContext) -> DraftTree:
        tokens = context.table.token_ids.clone()
        tree = super().propose(context)
        assert torch.equal(tokens, context.table.token_ids), "propose changed the context's token ids"
        count, vocab_size = len(context.requests), context.table.vocab_size
        assert tree.tokens.shape == tree.parents.shape, "tokens and parents have different shapes"
        assert len(tree.tokens) == len(tree.num_nodes) == count, f"{len(tree.tokens)} trees for {count} requests"
        if count:
            assert torch.equal(tree.tokens[:, ROOT], context.roots()), "a root is not the request's last token"
            assert bool(tree.is_valid(vocab_size).all()), "a parent follows its child, or a token is unknown"
            most = int(tree.num_nodes.max()) - 1
            assert most <= self.max_draft_tokens, f"{most} drafts, but max_draft_tokens is {self.max_draft_tokens}"
            deepest = int(tree.ancestors().sum(-1).max()) - 1
            assert deepest <= tree.max_depth, f"a node at depth {deepest}, but max_depth is {tree.max_depth}"
        return tree


class _Missing(_Wrapped):
    """Is not called in the first steps, and in some of the others."""

    def __init__(self, drafter: Drafter, num_late: int) -> None:
        super().__init__(drafter)
        self._random = Random(0)
        self._num_left = num_late

    def propose(self, context: ProposeContext) -> DraftTree:
        self._num_left -= 1
        if self._num_left >= 0 or self._random.random() < MISSED_SHARE:
            raise DraftFaultError(DraftFault.LATE)
        return super().propose(context)


def _prompts(llm: LLM) -> list[list[int]]:
    """Prompts with repetitions, some of them with the same beginning."""
    random, limit = Random(1), min(llm.engine.capacity.vocab_size, 1000)
    shared = [random.randrange(3, limit) for _ in range(20)]
    return [shared + [random.randrange(3, limit) for _ in range(3 + row)] + shared[:6] for row in range(NUM_PROMPTS)]


def _params() -> list[SamplingParams]:
    """Greedy and sampled in turn."""
    return [
        SamplingParams(temperature=float(row % 2), seed=row, max_tokens=MAX_TOKENS, ignore_eos=True)
        for row in range(NUM_PROMPTS)
    ]


def _engine(llm: LLM, speculative: SpeculativeConfig, wrap: Wrap | None = None, **options: Any) -> LLM:
    """An engine over the weights of `llm`, its drafter wrapped."""
    update = {"speculative": speculative, "max_running_requests": MAX_ROWS, **options}
    worker = llm._executor.worker
    engine = LLM(llm.config.model_copy(update=update), _model=worker.model)
    drafts = engine._executor.worker._drafts
    if wrap is not None:
        assert isinstance(drafts, InlineDrafts)
        assert drafts.drafter is not None
        drafts.drafter = wrap(drafts.drafter)
    return engine


def _answers(engine: LLM, limits: Sequence[DraftLimit] | None = None) -> list[Completion]:
    generations = engine.generate(_prompts(engine), _params(), draft_limits=limits)
    return [generation.choices[0] for generation in generations]


def _generate(llm: LLM, speculative: SpeculativeConfig, wrap: Wrap | None = None, **options: Any) -> list[Completion]:
    with _engine(llm, speculative, wrap, **options) as engine:
        return _answers(engine)


def _assert_same(answers: Sequence[Completion], expected: Sequence[Completion], where: str) -> None:
    for row, (answer, truth) in enumerate(zip(answers, expected, strict=True)):
        assert answer.token_ids == truth.token_ids, f"request {row} {where}: not the output of plain decoding"
