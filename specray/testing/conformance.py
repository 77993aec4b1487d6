"""The checks that every drafter passes. Each takes an engine's configuration and raises AssertionError.

They compare the drafter's output with that of plain decoding, token by token. They load the target of the configuration
in float32 and without quantization, so that rounding causes no difference.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from specray.config import EngineConfig, SpeculativeConfig, with_values
from specray.llm import LLM
from specray.models.target_model import TargetModel
from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import NONE, ROOT, DraftTree
from specray.spec_decode.drafter import Drafter, DraftFaultError
from specray.spec_decode.inline_drafts import InlineDrafts
from specray.spec_decode.propose_context import ProposeContext
from specray.step import UNLIMITED, DraftFault, DraftLimit
from specray.worker.local import LocalExecutor

# Token ids below 64, which every vocabulary has; repetitive, so that n-gram lookups find matches.
PREFIX = [0, 9, 8, 7, 6, 5, 4, 30, 31, 32, 9, 8, 7, 6, 5, 4, 30, 31]
PROMPTS = [[*PREFIX[: 3 + 2 * (i % 8)], 4 + i, 9, 8] for i in range(12)]
SAMPLING_OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 8, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0.7, "repetition_penalty": 1.3, "banned_sequences": [[9], [8, 7], [30, 31, 32], [1]]},
    {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {10: 4.0, 11: -100.0}, "allowed_token_ids": [*range(4, 40)]},
    {"temperature": 1.0, "min_tokens": 10, "logit_bias": {1: 3.0}},
    {"temperature": 1.0, "stop": ["a", "th"], "logprobs": 3, "logprob_token_ids": [7, 9]},
    {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 30,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {12: 2.0},
        "min_tokens": 5,
        "stop": ["on"],
        "logprobs": 0,
    },
]
SAMPLED, SHORT = (
    [SamplingParams(seed=100 + i, max_tokens=most, **options) for i, options in enumerate(SAMPLING_OPTIONS)]
    for most in (30, 12)
)
GREEDY = [SamplingParams(temperature=0.0, max_tokens=4 + 2 * i, ignore_eos=True) for i in range(len(PROMPTS))]
DRAFT_LIMITS = [DraftLimit(0, 0), DraftLimit(1, 1), DraftLimit(2, 9), DraftLimit(9, 2), DraftLimit(9, 0), UNLIMITED] * 2
MAX_LOGPROB_ERROR = 2e-4
BATCH_SIZES = (1, 8)


def check_greedy_output(config: EngineConfig) -> None:
    """Greedy output equals that of plain decoding, for one request at a time and for several."""
    for size in BATCH_SIZES:
        with _engine(config, max_running_requests=size) as llm:
            _require_plain(config, llm, GREEDY)


def check_sampled_output(config: EngineConfig) -> None:
    """Sampled output equals that of plain decoding, under a range of sampling options."""
    for size in BATCH_SIZES:
        with _engine(config, max_running_requests=size) as llm:
            _require_plain(config, llm, SAMPLED)


def check_trees(config: EngineConfig) -> None:
    """Trees have the documented layout, the last known tokens as roots, and at most `max_draft_tokens` drafts."""
    with _engine(config) as llm:
        watched = _watch(llm)
        _run(llm, SHORT)
    _require(watched.num_drafts > 0, "the drafter drafted no token, so nothing was checked")


def check_draft_limits(config: EngineConfig) -> None:
    """Limits of requests hold and do not change the output."""
    with _engine(config) as llm:
        choices = _run(llm, SAMPLED, draft_limits=DRAFT_LIMITS)
    require_equal(choices, _expected(config, SAMPLED))
    usages = [choice.usage for choice in choices if choice.usage]
    for usage, limit in zip(usages, DRAFT_LIMITS, strict=True):
        accepted, most = len(usage.accept_histogram) - 1, usage.num_verify_steps * limit.num_tokens
        _require(
            accepted <= min(limit.num_tokens, limit.num_steps),
            f"{accepted} drafts were accepted in a step under {limit}",
        )
        _require(usage.num_draft_tokens <= most, f"{usage.num_draft_tokens} drafts were verified under {limit}")
    _require(sum(usage.num_draft_tokens for usage in usages) > 0, "no draft was verified, so nothing was checked")


def check_scheduling(config: EngineConfig) -> None:
    """Requests may join late, reuse slots, start from the prefix cache, be prefilled in chunks, and be preempted."""
    chunks = {"chunked_prefill_size": 5, "max_prefill_tokens": 8, "page_size": 4, "max_running_requests": 3}
    small = {"max_total_tokens": 96 + (config.speculative.max_num_nodes or 0), "page_size": 4}
    with _engine(config, **chunks) as llm:
        _watch(llm)
        for _ in range(2):
            _require_plain(config, llm, SHORT)
    with _engine(config, **small) as llm:
        _watch(llm)
        _require_plain(config, llm, SAMPLED)


def check_missed_steps(config: EngineConfig) -> None:
    """The drafter continues after steps that it did not receive, at the start or later."""
    for missed in ({1, 2, 3, 4, 5, 6}, {1, 3, 4, 7, 10, 13, 14, 15}):
        with _engine(config) as llm:
            watched = _watch(llm, is_missed=missed.__contains__)
            _require_plain(config, llm, SHORT)
        _require(watched.num_drafts > 0, "the drafter drafted no token, so nothing was checked")


def check_wrong_drafts(config: EngineConfig) -> None:
    """Drafts that were replaced by other tokens do not change the output."""

    def other(tree: DraftTree) -> DraftTree:
        tokens = torch.where(tree.tokens == NONE, NONE, (tree.tokens + 1) % llm.engine.capacity.vocab_size)
        tokens[:, ROOT] = tree.tokens[:, ROOT]
        return DraftTree(tokens, tree.parents, tree.num_nodes, tree.max_depth)

    with _engine(config) as llm:
        _watch(llm, alter=other)
        _require_plain(config, llm, SHORT)


def check_own_process(config: EngineConfig) -> None:
    """The drafter needs only what it is given in a process of its own, where `target.model` is None."""
    from specray.worker.remote_drafter.server import make_remote_drafter, remote_target_view

    with _engine(config) as llm:
        capacity = llm.engine.capacity
        drafts = _drafts_of(llm)
        drafts.drafter = make_remote_drafter(
            llm.config, remote_target_view(llm.config), capacity.num_blocks * llm.config.page_size
        )
        _require(
            drafts.drafter.max_draft_tokens == capacity.max_draft_tokens, "max_draft_tokens depends on target.model"
        )
        _watch(llm)
        _require_plain(config, llm, SHORT)


Check = Callable[[EngineConfig], None]
DRAFTER_CHECKS: list[Check] = [
    check_greedy_output,
    check_sampled_output,
    check_trees,
    check_draft_limits,
    check_scheduling,
    check_missed_steps,
    check_wrong_drafts,
    check_own_process,
]


class _WatchedDrafter:
    """A drafter whose trees are checked and may be altered. It does not receive the steps that `is_missed` selects."""

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        alter: Callable[[DraftTree], DraftTree],
        is_missed: Callable[[int], bool],
    ) -> None:
        self.max_draft_tokens = drafter.max_draft_tokens
        self.aux_hidden_state_layers = drafter.aux_hidden_state_layers
        self.reads_next_token = drafter.reads_next_token
        self.num_drafts = 0
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._alter = alter
        self._is_missed = is_missed
        self._num_steps = 0

    def propose(self, context: ProposeContext) -> DraftTree:
        self._num_steps += 1
        if self._is_missed(self._num_steps):
            raise DraftFaultError(DraftFault.LATE)
        token_ids = context.table.token_ids.clone()
        tree = self._drafter.propose(context)
        _require(torch.equal(context.table.token_ids, token_ids), "propose changed the token ids of its context")
        self._check(tree, context)
        self.num_drafts += int((tree.num_nodes - 1).sum())
        return self._alter(tree)

    def release(self, slots: Sequence[int]) -> None:
        self._drafter.release(slots)

    def _check(self, tree: DraftTree, context: ProposeContext) -> None:
        tokens, parents, num_nodes = tree.tokens, tree.parents, tree.num_nodes
        num_rows = len(context.requests)
        shapes = [list(part.shape) for part in (tokens, parents, num_nodes)]
        expected = [[num_rows, tokens.shape[-1]]] * 2 + [[num_rows]]
        _require(shapes == expected, f"tokens, parents and num_nodes have shapes {shapes}; expected {expected}")
        types = {part.dtype for part in (tokens, parents, num_nodes)}
        _require(types == {torch.int64}, f"tokens, parents and num_nodes have types {types}; expected int64")
        if not num_rows:
            return
        roots, most = context.roots(), self.max_draft_tokens
        _require(bool((num_nodes >= 1).all()), f"num_nodes={num_nodes.tolist()}: a tree has at least its root")
        _require(
            bool((num_nodes <= most + 1).all()), f"num_nodes={num_nodes.tolist()} exceeds max_draft_tokens={most} + 1"
        )
        _require(torch.equal(tokens[:, ROOT], roots), f"roots {tokens[:, ROOT].tolist()}; expected {roots.tolist()}")
        _require(bool((parents[:, ROOT] == NONE).all()), f"parents of roots {parents[:, ROOT].tolist()}; expected -1")
        _require(bool(tree.is_valid(self._vocab_size).all()), f"a token or a parent is invalid in {tree.to_lists()}")
        is_node = torch.arange(tokens.shape[1], device=tokens.device) < num_nodes[:, None]
        depth = int(((tree.ancestors().sum(-1) - 1) * is_node).max())
        _require(depth <= tree.max_depth, f"a node at depth {depth} is below max_depth={tree.max_depth}")


def _watch(
    llm: LLM,
    alter: Callable[[DraftTree], DraftTree] = lambda tree: tree,
    is_missed: Callable[[int], bool] = lambda step: False,  # noqa: ARG005
) -> _WatchedDrafter:
    drafts = _drafts_of(llm)
    assert drafts.drafter is not None
    drafts.drafter = watched = _WatchedDrafter(drafts.drafter, llm.engine.capacity.vocab_size, alter, is_missed)
    return watched


def _drafts_of(llm: LLM) -> InlineDrafts:
    executor = llm.engine.executor
    assert isinstance(executor, LocalExecutor)
    drafts = executor.worker.drafts
    assert isinstance(drafts, InlineDrafts)
    return drafts


def _engine(config: EngineConfig, **options: Any) -> LLM:
    """An engine with the configured drafter; it shares the weights of the target that `_expected` has loaded."""
    _require(config.speculative.has_drafter, "speculative.algorithm is null; name the drafter to check")
    exact = _exact(config, config.speculative)
    model, _ = _plain(_exact(config, SpeculativeConfig()).model_dump_json())
    return LLM(with_values(exact, **options), _model=model)


def _run(llm: LLM, params: Sequence[SamplingParams], **options: Any) -> list[Completion]:
    return [generation.choices[0] for generation in llm.generate(PROMPTS, params, **options)]


def _expected(config: EngineConfig, params: Sequence[SamplingParams]) -> list[Completion]:
    _, outputs = _plain(_exact(config, SpeculativeConfig()).model_dump_json())
    return next(choices for known, choices in outputs if known is params)


@lru_cache(maxsize=1)
def _plain(
    config_json: str,  # a configuration has dicts, so it cannot be a key
) -> tuple[TargetModel, list[tuple[Sequence[SamplingParams], list[Completion]]]]:
    """The target, and its outputs for each list of parameters: one request at a time, without a prefix cache."""
    alone = {"max_running_requests": 1, "disable_radix_cache": True}
    with LLM(with_values(EngineConfig.model_validate_json(config_json), **alone)) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, LocalExecutor)
        return executor.worker.model, [(params, _run(llm, params)) for params in (SAMPLED, SHORT, GREEDY)]


def _exact(config: EngineConfig, speculative: SpeculativeConfig) -> EngineConfig:
    """`config` with `speculative`, in float32, where rounding does not decide between tokens."""
    return with_values(config, dtype="float32", quantization=None, speculative=speculative)


def _require_plain(config: EngineConfig, llm: LLM, params: Sequence[SamplingParams]) -> None:
    require_equal(_run(llm, params), _expected(config, params))


def require_equal(choices: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for index, (seen, plain) in enumerate(zip(choices, expected, strict=True)):
        _require(
            _visible(seen) == _visible(plain),
            f"request {index} has output {_visible(seen)}; plain decoding has {_visible(plain)}",
        )
        _require_close(seen, plain)


def _require_close(seen: Completion, plain: Completion) -> None:
    """Logprobs are computed in batches of other shapes, so they are only nearly equal."""
    for entry, expected in zip(seen.logprobs or [], plain.logprobs or [], strict=True):
        names, expected_names = [token for token, _ in entry.top], [token for token, _ in expected.top]
        _require(names == expected_names, f"the most likely tokens are {names}; plain decoding has {expected_names}")
        difference = abs(entry.logprob - expected.logprob)
        _require(difference <= MAX_LOGPROB_ERROR, f"a logprob differs by {difference} from plain decoding's")


def _visible(completion: Completion) -> tuple[object, ...]:
    """The parts of a choice that must not depend on how it was computed."""
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason


def _require(is_met: bool, message: str) -> None:
    """An `assert` that Python's -O does not remove and whose message does not need pytest."""
    if not is_met:
        raise AssertionError(message)
