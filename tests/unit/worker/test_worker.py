"""One rank with hand-written plans: emitted tokens, KV, drafters' input, and isolation of requests."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.llama import Llama
from specray.ops.cpu.library import kernels
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import Drafter
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.step import UNLIMITED, DraftLimit, NewRequest, RequestResult, SamplingOptions, ScheduledRequest, StepPlan
from specray.worker import startup
from specray.worker.no_token import NOT_A_NUMBER
from specray.worker.startup import start_worker
from tests.support.distributions import OPTIONS
from tests.support.drafters import DRAWS, ScriptedDrafter, draw_right, draw_right_last
from tests.support.engine import make_llm
from tests.support.mtp import write_deepseek
from tests.support.naive_eagle import attend_to_the_past
from tests.support.toy import VOCAB_SIZE, oracle_greedy

PAGE = 4
BLOCKS = 16  # per slot; slot s owns blocks 16 s + 1 … 16 s + 16
GREEDY = OPTIONS._replace(temperature=0.0)
SAMPLED = OPTIONS._replace(temperature=0.9, seed=7)
PROMPT = [0, 9, 8, 7, 6, 5, 4, 9, 8]


def at_most(num_tokens: int) -> DraftLimit:
    return UNLIMITED._replace(num_tokens=num_tokens)


class Driver:
    """A worker and a minimal scheduler, which gives each slot a fixed range of blocks."""

    def __init__(self, folder: Path, drafter: Drafter | None = None) -> None:
        config = EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            num_threads=1,
            page_size=PAGE,
            max_total_tokens=4 * BLOCKS * PAGE,
        )
        self.worker = start_worker(config, drafter=drafter)
        self._freed: list[int] = []
        self._entered: list[NewRequest] = []
        self._steps = 0

    def enter(self, slot: int, tokens: Sequence[int] = PROMPT, sampling: SamplingOptions = GREEDY) -> None:
        blocks = list(range(BLOCKS * slot + 1, BLOCKS * (slot + 1) + 1))
        self._entered.append(NewRequest(slot, list(tokens), len(tokens), 0, blocks, sampling, ""))

    def free(self, slot: int) -> None:
        self._freed.append(slot)

    def step(
        self, slots: Sequence[int], num_tokens: int = 100, max_draft_tokens: int = 20, *, runs_drafter: bool = True
    ) -> list[RequestResult]:
        rows = [ScheduledRequest(slot, num_tokens, at_most(max_draft_tokens), []) for slot in slots]
        self._steps += 1
        result = self.worker.execute(StepPlan(self._steps, self._freed, self._entered, rows, runs_drafter))
        assert result.step_id == self._steps
        if runs_drafter:
            self.worker.propose()
        self._freed, self._entered = [], []
        return result.rows

    def run(self, slot: int, num_tokens: int) -> list[int]:
        """Run steps of one slot until it has emitted at least `num_tokens` tokens; returns all of them."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            [row] = self.step([slot])
            assert row.error is None
            tokens += row.token_ids
        return tokens

    def kv(self, slot: int, length: int) -> torch.Tensor:
        """KV of the first `length` tokens of a slot."""
        first = (BLOCKS * slot + 1) * PAGE
        return self.worker.backend.runner.kv.pool[:, first : first + length]


@pytest.fixture(scope="module")
def greedy(toy: Path) -> list[int]:
    """PROMPT and its greedy continuation by the reference model."""
    return PROMPT + oracle_greedy(toy, PROMPT, 36)


def test_a_prompt_computed_in_one_step_emits_the_targets_token(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy)
    driver.enter(1)
    assert driver.step([1]) == [RequestResult(1, greedy[9:10], 0, None, None, [])]
    assert driver.run(1, 8) == greedy[10:18]


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 8])
def test_a_chunk_that_is_not_the_last_emits_nothing(chunk: int, toy: Path, greedy: list[int]) -> None:
    drafted: list[list[int]] = []

    class Recorder(ScriptedDrafter):
        def propose(self, context: ProposeContext) -> DraftTree:
            drafted.extend(context.token_ids(request).copy() for request in context.requests)
            return super().propose(context)

    driver = Driver(toy, Recorder(draw_right, [greedy]))
    driver.enter(0)
    for _ in range((len(PROMPT) - 1) // chunk):
        assert driver.step([0], num_tokens=chunk) == [RequestResult(0, [], 0, None, None, [])]
    assert drafted == []
    assert driver.step([0], num_tokens=chunk)[0].token_ids == greedy[9:10]
    assert drafted == [greedy[:10]]


def test_chunks_and_decoding_rows_share_a_step(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy)
    driver.enter(0)
    driver.step([0])
    driver.enter(2)
    emitted = [driver.step([0, 2], num_tokens=3) for _ in range(4)]
    assert [[row.slot for row in rows] for rows in emitted] == [[0, 2]] * 4
    assert [token for rows in emitted for token in rows[0].token_ids] == greedy[10:14]
    assert [rows[1].token_ids for rows in emitted] == [[], [], greedy[9:10], greedy[10:11]]


@pytest.mark.parametrize("draw", DRAWS)
def test_output_and_kv_do_not_depend_on_drafts(draw: str, toy: Path, greedy: list[int]) -> None:
    """After any drafts, the committed KV is that of plain decoding."""
    plain = Driver(toy)
    drafted = Driver(toy, ScriptedDrafter(DRAWS[draw], [greedy]))
    for driver in (plain, drafted):
        driver.enter(1)
    tokens = drafted.run(1, 20)
    plain.run(1, len(tokens))
    assert tokens == greedy[9 : 9 + len(tokens)]
    committed = len(PROMPT) + len(tokens) - 1
    torch.testing.assert_close(drafted.kv(1, committed), plain.kv(1, committed), atol=1e-5, rtol=1e-4)


def test_right_drafts_are_accepted_and_counted(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy, ScriptedDrafter(draw_right, [greedy]))
    driver.enter(0)
    driver.step([0])
    assert driver.step([0], max_draft_tokens=5) == [RequestResult(0, greedy[10:16], 5, None, None, [1, 2, 3, 4, 5])]
    assert driver.step([0], max_draft_tokens=0) == [RequestResult(0, greedy[16:17], 0, None, None, [])]


def test_all_nodes_of_a_tree_count_as_drafts(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy, ScriptedDrafter(draw_right_last, [greedy]))
    driver.enter(0)
    driver.step([0])
    assert driver.step([0]) == [RequestResult(0, greedy[10:14], 12, None, None, [4, 8, 12])]


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_no_kv_slot_beyond_the_draft_limit_is_written(limit: int, toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy, ScriptedDrafter(draw_right, [[*greedy[:10], *[3] * 30]]))  # longer than the limit, and wrong
    driver.enter(0)
    driver.step([0])
    driver.step([0], max_draft_tokens=limit)
    written = driver.worker.backend.runner.kv.pool.flatten(2).any(-1).all(0).nonzero().flatten().tolist()
    assert written == list(range(PAGE, PAGE + len(PROMPT) + 1 + limit))


@pytest.mark.parametrize(
    "tree",
    [
        TreeLists([5, VOCAB_SIZE], [NONE, 0]),
        TreeLists([5, -1, 3], [NONE, 0, 1]),
        TreeLists([5, 1, 2], [NONE, 2, 0]),
        TreeLists([5, 1, 2], [NONE, 0, 7]),
    ],
)
def test_an_invalid_tree_does_not_change_output(tree: TreeLists, toy: Path, greedy: list[int]) -> None:
    drafter = ScriptedDrafter(lambda root, future, random: TreeLists([root, *tree.tokens[1:]], tree.parents))  # noqa: ARG005
    driver = Driver(toy, drafter)
    driver.enter(0)
    assert driver.run(0, 10) == greedy[9:19]


def test_blocks_added_in_later_steps_are_used(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy)
    row = NewRequest(0, PROMPT, len(PROMPT), 0, [9, 3, 30], GREEDY, "")
    driver.worker.execute(StepPlan(0, [], [row], [ScheduledRequest(0, 100, at_most(0), [])]))
    for i in range(10, 30):
        added = [35 + i] if (i - 1) % PAGE == 0 and i > 3 * PAGE else []
        [result] = driver.worker.execute(StepPlan(i, [], [], [ScheduledRequest(0, 1, at_most(0), added)])).rows
        assert result.token_ids == [greedy[i]]


def test_a_cached_prefix_is_not_computed_again(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy)
    driver.enter(0)
    driver.step([0])
    again = NewRequest(2, PROMPT, len(PROMPT), 2 * PAGE, [1, 2, 60], GREEDY, "")
    [row] = driver.worker.execute(StepPlan(9, [], [again], [ScheduledRequest(2, 100, at_most(0), [])])).rows
    assert row.token_ids == greedy[9:10]


# ---- isolation of requests ------------------------------------------------------------------------------------------

PROMPTS = [PROMPT, [0, 20, 21], [0, *range(10, 40)]]


def run_together(driver: Driver, num_steps: int, broken: int | None) -> dict[int, list[RequestResult]]:
    """Results by slot of three sampled requests. The KV of slot `broken` becomes NaN after the second step."""
    for slot, prompt in enumerate(PROMPTS):
        driver.enter(slot, prompt, SAMPLED._replace(seed=slot))
    results: dict[int, list[RequestResult]] = {slot: [] for slot in range(len(PROMPTS))}
    active = sorted(results)
    for step in range(num_steps):
        if step == 2 and broken is not None:
            driver.kv(broken, 2)[1] = torch.nan
        for row in driver.step(active):
            results[row.slot].append(row)
            if row.error:
                active.remove(row.slot)
                driver.free(row.slot)
    return results


@pytest.mark.parametrize("draw", ["empty", "random"])
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_request_with_nan_ends_and_others_are_unchanged(draw: str, broken: int, toy: Path) -> None:
    clean, faulty = (run_together(Driver(toy, ScriptedDrafter(DRAWS[draw])), 12, slot) for slot in (None, broken))
    assert faulty[broken][-1] == RequestResult(broken, [], 0, None, NOT_A_NUMBER)
    assert len(faulty[broken]) == 3
    for slot in set(range(len(PROMPTS))) - {broken}:
        texts = [[token for row in results[slot] for token in row.token_ids] for results in (clean, faulty)]
        length = min(map(len, texts))  # random drafts differ without the request, so the number of tokens does, too
        assert length >= 12
        assert texts[0][:length] == texts[1][:length]
        assert all(row.error is None for row in faulty[slot])


def test_nan_in_a_chunk_ends_its_request(toy: Path) -> None:
    driver = Driver(toy)
    driver.enter(0)
    driver.step([0], num_tokens=3)
    driver.kv(0, 1)[:] = torch.nan
    assert driver.step([0], num_tokens=3) == [RequestResult(0, [], 0, None, NOT_A_NUMBER)]


def test_blocks_with_nan_can_be_used_by_the_next_request(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy)
    driver.enter(0)
    driver.step([0])
    driver.worker.backend.runner.kv.pool[:, PAGE:] = torch.nan  # all but the null block
    assert driver.step([0])[0].error == NOT_A_NUMBER
    driver.free(0)
    driver.enter(0)
    assert driver.run(0, 8) == greedy[9:17]


# ---- input of drafters ----------------------------------------------------------------------------------------------

LAYERS = (1, 0, 2)  # inputs of the second and of the first of two layers, and the output of the final norm


class RecordedRequest(NamedTuple):
    """A request of a ProposeContext."""

    request: DraftRequest
    token_ids: list[int]
    num_prompt_tokens: int
    cache_salt: str
    sampling: SamplingOptions
    kv_slots: list[int]  # from the device, up to `request.end`


class RecordedContext(NamedTuple):
    requests: list[RecordedRequest]
    unfinished: list[RecordedRequest]
    aux_hidden_states: torch.Tensor | None
    missed_kv_slots: set[int]

    @property
    def slots(self) -> list[int]:
        return [recorded.request.slot for recorded in self.requests]


class ContextRecorder(ScriptedDrafter):
    """Keeps a copy of each context."""

    aux_hidden_state_layers = LAYERS

    def __init__(self, draw: str, texts: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(DRAWS[draw], texts)
        self.contexts: list[RecordedContext] = []

    def propose(self, context: ProposeContext) -> DraftTree:
        drafted, unfinished = (
            [self._copy(context, request) for request in part] for part in (context.requests, context.unfinished)
        )
        missed = set(context.missed_kv_slots)
        self.contexts.append(RecordedContext(drafted, unfinished, context.aux_hidden_states, missed))
        return super().propose(context)

    def _copy(self, context: ProposeContext, request: DraftRequest) -> RecordedRequest:
        table, slot = context.table, request.slot
        state = table.states[slot]
        known = table.token_ids[slot, : len(state.token_ids)].tolist()
        assert known == state.token_ids == context.token_ids(request)  # device and host agree
        assert int(table.num_tokens[slot]) == len(known)
        assert int(table.seeds[slot]) == state.sampling.options.seed
        kv_slots = table.kv_slots[slot, : request.end].tolist()
        return RecordedRequest(
            request, known, state.num_prompt_tokens, state.cache_salt, state.sampling.options, kv_slots
        )


def true_aux_hidden_states(model: Llama, recorded: RecordedRequest) -> torch.Tensor:
    """Hidden states of the tokens computed in the step, from one forward over all tokens without a cache."""
    tokens = torch.tensor(recorded.token_ids)
    with torch.inference_mode():
        _, aux_hidden_states = model(tokens, torch.arange(len(tokens)), attend_to_the_past, LAYERS)
    return torch.cat(aux_hidden_states, -1)[recorded.request.start : recorded.request.end]


def assert_true_aux_hidden_states(driver: Driver, context: RecordedContext) -> None:
    expected = [
        true_aux_hidden_states(driver.worker.model, recorded) for recorded in context.requests + context.unfinished
    ]
    torch.testing.assert_close(context.aux_hidden_states, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_a_drafter_gets_the_request_and_the_computed_range(toy: Path, greedy: list[int]) -> None:
    recorder = ContextRecorder("empty")
    driver = Driver(toy, recorder)
    driver.enter(2, sampling=SAMPLED._replace(temperature=0.0, seed=-5))
    driver.step([2])
    [context] = recorder.contexts
    [recorded] = context.requests
    assert (recorded.token_ids, recorded.num_prompt_tokens, recorded.cache_salt) == (greedy[:10], len(PROMPT), "")
    assert recorded.request[:3] == (2, 0, len(PROMPT))
    assert (recorded.sampling.seed, recorded.sampling.temperature) == (-5, 0.0)
    first = (BLOCKS * 2 + 1) * PAGE
    assert recorded.kv_slots == list(range(first, first + len(PROMPT)))
    assert context.unfinished == []
    assert_true_aux_hidden_states(driver, context)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_drafter_gets_the_hidden_states_of_accepted_nodes(draw: str, toy: Path, greedy: list[int]) -> None:
    """For consecutive ranges and trees of any shape. In `right-last` trees, accepted nodes are not the first ones."""
    recorder = ContextRecorder(draw, [greedy])
    driver = Driver(toy, recorder)
    driver.enter(1)
    driver.run(1, 20)
    end = 0
    for context in recorder.contexts:
        [recorded] = context.requests
        assert recorded.request[1:3] == (end, len(recorded.token_ids) - 1)
        assert_true_aux_hidden_states(driver, context)
        end = recorded.request.end


@pytest.mark.parametrize("limit", [DraftLimit(0, 9), DraftLimit(9, 0), DraftLimit(3, 9), DraftLimit(9, 2)])
def test_a_drafter_gets_the_draft_limit(limit: DraftLimit, toy: Path) -> None:
    """A request whose limit is 0 is passed as unfinished: it is read but not drafted for."""
    recorder = ContextRecorder("random")
    driver = Driver(toy, recorder)
    row = NewRequest(2, PROMPT, len(PROMPT), 0, [1, 2, 60], GREEDY, "")
    driver.worker.execute(StepPlan(9, [], [row], [ScheduledRequest(2, 100, limit, [])]))
    driver.worker.propose()
    [context] = recorder.contexts
    [recorded] = context.requests or context.unfinished
    steps = min(limit.num_tokens, limit.num_steps)
    assert bool(context.requests) == (steps > 0)
    assert (recorded.request.draft_limit.num_steps, recorded.request.end) == (steps, len(PROMPT))
    assert_true_aux_hidden_states(driver, context)


@pytest.mark.parametrize("chunk", [1, 4, 8])
def test_requests_with_known_tokens_left_are_unfinished(chunk: int, toy: Path) -> None:
    recorder = ContextRecorder("random")
    driver = Driver(toy, recorder)
    driver.enter(0)
    for start in range(0, len(PROMPT), chunk):
        driver.step([0], num_tokens=chunk)
        context = recorder.contexts[-1]
        is_last = start + chunk >= len(PROMPT)
        [recorded] = context.requests if is_last else context.unfinished
        assert len(context.requests + context.unfinished) == 1
        assert recorded.request[1:3] == (start, min(start + chunk, len(PROMPT)))
        assert recorded.token_ids[: len(PROMPT)] == PROMPT  # the token after the chunk included
        assert_true_aux_hidden_states(driver, context)


def test_aux_hidden_states_of_unfinished_requests_come_last(toy: Path) -> None:
    recorder = ContextRecorder("random")
    driver = Driver(toy, recorder)
    for slot, prompt in enumerate([PROMPT, [0, 20], [0, *range(10, 30)], [7]]):
        driver.enter(slot, prompt, SAMPLED)
    for order in ([2, 1, 0, 3], [0, 3, 2, 1], [3, 2, 1, 0], [1, 0]):
        driver.step(order, num_tokens=4)
        context = recorder.contexts[-1]
        slots = [recorded.request.slot for recorded in context.requests + context.unfinished]
        assert sorted(slots) == sorted(order)
        assert context.slots == [slot for slot in order if slot in context.slots]
        assert_true_aux_hidden_states(driver, context)
    assert [len(context.unfinished) for context in recorder.contexts] == [2, 2, 1, 0]


def test_the_computed_range_excludes_cached_tokens(toy: Path) -> None:
    recorder = ContextRecorder("empty")
    driver = Driver(toy, recorder)
    driver.enter(0)
    driver.step([0])
    again = NewRequest(2, PROMPT, len(PROMPT), 2 * PAGE, [1, 2, 60], GREEDY, "tenant")
    driver.worker.execute(StepPlan(9, [], [again], [ScheduledRequest(2, 100, at_most(1), [])]))
    driver.worker.propose()
    [recorded] = recorder.contexts[-1].requests
    assert (*recorded.request[1:3], recorded.cache_salt) == (2 * PAGE, len(PROMPT), "tenant")
    assert recorded.kv_slots == [*range(PAGE, 3 * PAGE), 60 * PAGE]
    assert_true_aux_hidden_states(driver, recorder.contexts[-1])


def test_a_drafter_gets_the_kv_slots_of_steps_that_it_did_not_see(toy: Path, greedy: list[int]) -> None:
    recorder = ContextRecorder("right", [greedy])
    driver = Driver(toy, recorder)
    driver.enter(1)
    driver.enter(2)
    driver.step([1], max_draft_tokens=0)
    driver.step([1], runs_drafter=False)
    driver.step([2], num_tokens=2, runs_drafter=False)
    driver.step([1])
    driver.step([1])
    first, second = (PAGE * (BLOCKS * slot + 1) for slot in (1, 2))
    assert [context.missed_kv_slots for context in recorder.contexts] == [
        set(),
        {first + len(PROMPT), second, second + 1},
        set(),
    ]


def test_a_request_with_nan_is_not_drafted_for(toy: Path) -> None:
    recorder = ContextRecorder("random")
    driver = Driver(toy, recorder)
    run_together(driver, 4, broken=1)
    assert [context.slots for context in recorder.contexts] == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2]]
    for context in recorder.contexts:
        assert_true_aux_hidden_states(driver, context)


def test_a_drafter_without_layers_gets_no_hidden_states(toy: Path) -> None:
    contexts: list[ProposeContext] = []

    class Recorder(ScriptedDrafter):
        def propose(self, context: ProposeContext) -> DraftTree:
            contexts.append(context)
            return super().propose(context)

    driver = Driver(toy, Recorder(DRAWS["random"]))
    driver.enter(0)
    driver.step([0])
    assert [context.aux_hidden_states for context in contexts] == [None]


# ---- slots and resumed requests -------------------------------------------------------------------------------------


def test_a_freed_slot_can_be_used_in_the_same_step(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy, ScriptedDrafter(draw_right, [greedy]))
    driver.enter(0, [0, 30, 31, 32], SAMPLED)
    driver.run(0, 5)
    driver.free(0)
    driver.enter(0)
    assert driver.run(0, 20)[:20] == greedy[9:29]


def test_a_freed_slot_has_no_request(toy: Path) -> None:
    driver = Driver(toy)
    driver.enter(0)
    driver.step([0])
    driver.free(0)
    assert driver.step([]) == []
    with pytest.raises(KeyError):
        driver.step([0])


def test_nothing_is_drafted_for_ended_requests(toy: Path) -> None:
    """Regression: an ended request was drafted for again, and the next one in its slot got the tree."""
    released, contexts = [], []

    class Recorder(ScriptedDrafter):
        def propose(self, context: ProposeContext) -> DraftTree:
            contexts.append([request.slot for request in context.requests])
            return super().propose(context)

        def release(self, slots: Sequence[int]) -> None:
            released.extend(slots)

    driver = Driver(toy, Recorder(DRAWS["random"]))
    driver.enter(3)
    driver.step([3])
    driver.free(3)
    driver.step([])
    assert released == [3]
    assert contexts == [[3], []]


def test_a_resumed_request_continues_its_output(toy: Path) -> None:
    """A preempted request enters with its output, which counts for penalties and for the positions of the noise."""
    sampling = SAMPLED._replace(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
    driver = Driver(toy)
    driver.enter(0, PROMPT, sampling)
    text = PROMPT + driver.run(0, 20)
    for length in (len(PROMPT) + 1, len(text) - 6):
        row = NewRequest(1, text[:length], len(PROMPT), 0, list(range(17, 33)), sampling, "")
        resumed = Driver(toy)
        [result] = resumed.worker.execute(StepPlan(0, [], [row], [ScheduledRequest(1, 100, at_most(0), [])])).rows
        assert result.token_ids + resumed.run(1, 5) == text[length : length + 6]


@pytest.mark.parametrize("seed", range(8))
def test_output_does_not_depend_on_order_chunks_and_draft_limits(seed: int, toy: Path) -> None:
    """Requests enter at random steps; order, chunks and draft limits are random."""
    random = Random(seed)
    driver = Driver(toy, ScriptedDrafter(DRAWS["random"]))
    texts: dict[int, list[int]] = {}
    while not texts or min(map(len, texts.values())) < 8 or len(texts) < len(PROMPTS):
        if len(texts) < len(PROMPTS) and random.random() < 0.5:
            driver.enter(len(texts), PROMPTS[len(texts)], SAMPLED._replace(seed=len(texts)))
            texts[len(texts)] = []
        active = [slot for slot in texts if len(texts[slot]) < 16 and random.random() < 0.7]
        for row in driver.step(random.sample(active, len(active)), random.randint(1, 9), random.randint(0, 6)):
            texts[row.slot] += row.token_ids
    for slot, text in texts.items():
        alone = Driver(toy)
        alone.enter(slot, PROMPTS[slot], SAMPLED._replace(seed=slot))
        assert text == alone.run(slot, len(text))


def test_a_step_without_rows(toy: Path) -> None:
    driver = Driver(toy)
    assert driver.step([]) == []
    assert np.isfinite(driver.worker.execute(StepPlan(5, [], [], [])).times.prepare)


def test_deterministic_is_refused_where_it_would_not_hold(toy: Path) -> None:
    """torch's attention sums keys in an order that depends on their number."""
    options: dict[str, Any] = {"attention_backend": "torch", "max_total_tokens": 256, "deterministic": True}
    config = EngineConfig(model=str(toy), dtype="bfloat16", device="cpu", **options)
    with pytest.raises(ConfigError, match="deterministic=true does not hold for LlamaForCausalLM on cpu"):
        start_worker(config)


@pytest.mark.skipif(kernels() is None, reason="torch's sums depend on the batch")
def test_deterministic_holds_for_deepseek_on_a_cpu(tmp_path: Path) -> None:
    write_deepseek(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", device="cpu", max_total_tokens=256, deterministic=True)
    assert start_worker(config).capacity.has_one_text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_text_is_promised_where_sums_over_ranks_depend_on_the_batch(
    toy: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(toy), dtype=dtype, device="cpu", max_total_tokens=256)
    group = RankGroup()
    monkeypatch.setattr(startup, "RankGroup", lambda *_: group)
    assert start_worker(config).capacity.has_one_text == (dtype == "float32" or kernels() is not None)
    group.has_fixed_sums = False
    assert not start_worker(config).capacity.has_one_text


@pytest.mark.parametrize("are_there", [True, False])
def test_an_engine_without_the_cpu_kernels_says_so(toy: Path, are_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = SimpleNamespace(name="cpu" if are_there else "torch", use_threads=lambda _: None)
    monkeypatch.setattr(startup, "ops_on", lambda _: ops)
    with make_llm(toy) as llm:
        assert llm.engine.stats.snapshot()["specray_cpu_kernels_absent"] == (not are_there)
