"""One rank driven by hand-written plans: what rows emit, what they leave in the pool, and how little they can harm."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from specray.config import EngineConfig
from specray.models.llama import Llama
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import Drafter, DraftRequest, ProposeContext
from specray.step import UNLIMITED, DraftLimit, NewRequest, RequestResult, SamplingOptions, ScheduledRow, StepPlan
from specray.worker.worker import NOT_A_NUMBER, Worker
from tests.support.distributions import OPTIONS
from tests.support.drafters import DRAWS, ScriptedDrafter, draw_right, draw_right_last
from tests.support.naive_eagle import attend_to_the_past
from tests.support.toy import VOCAB_SIZE, oracle_greedy

PAGE = 4
BLOCKS = 16  # of each slot; slot s owns blocks 16 s + 1 …
GREEDY = OPTIONS._replace(temperature=0.0)
SAMPLED = OPTIONS._replace(temperature=0.9, seed=7)
PROMPT = [0, 9, 8, 7, 6, 5, 4, 9, 8]


def at_most(num_tokens: int) -> DraftLimit:
    return UNLIMITED._replace(num_tokens=num_tokens)


class Driver:
    """A worker and the host's part of its steps, in the plainest form: blocks are given once and for all."""

    def __init__(self, folder: Path, drafter: Drafter | None = None) -> None:
        config = EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            num_threads=1,
            page_size=PAGE,
            max_total_tokens=4 * BLOCKS * PAGE,
        )
        self.worker = Worker(config, drafter=drafter)
        self._freed: list[int] = []
        self._entered: list[NewRequest] = []
        self._steps = 0

    def enter(self, slot: int, tokens: Sequence[int] = PROMPT, sampling: SamplingOptions = GREEDY) -> None:
        blocks = list(range(BLOCKS * slot + 1, BLOCKS * (slot + 1) + 1))
        self._entered.append(NewRequest(slot, list(tokens), len(tokens), 0, blocks, sampling, ""))

    def free(self, slot: int) -> None:
        self._freed.append(slot)

    def step(self, slots: Sequence[int], num_tokens: int = 100, max_draft_tokens: int = 20) -> list[RequestResult]:
        rows = [ScheduledRow(slot, num_tokens, at_most(max_draft_tokens), []) for slot in slots]
        self._steps += 1
        result = self.worker.execute(StepPlan(self._steps, self._freed, self._entered, rows))
        assert result.step_id == self._steps
        self.worker.propose()
        self._freed, self._entered = [], []
        return result.rows

    def run(self, slot: int, num_tokens: int) -> list[int]:
        """At least `num_tokens` tokens of one slot."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            [row] = self.step([slot])
            assert row.error is None
            tokens += row.token_ids
        return tokens

    def kv(self, slot: int, length: int) -> torch.Tensor:
        """The KV of a slot's first tokens."""
        first = (BLOCKS * slot + 1) * PAGE
        return self.worker._runner.kv.pool[:, first : first + length]


@pytest.fixture(scope="module")
def greedy(toy: Path) -> list[int]:
    """PROMPT and its greedy continuation, by the oracle."""
    return PROMPT + oracle_greedy(toy, PROMPT, 36)


def test_one_prompt_in_one_step_emits_the_targets_token(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy)
    driver.enter(1)
    assert driver.step([1]) == [RequestResult(1, greedy[9:10], 0, None, None)]
    assert driver.run(1, 8) == greedy[10:18]


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 8])
def test_a_chunk_that_is_not_the_last_emits_nothing(chunk: int, toy: Path, greedy: list[int]) -> None:
    asked: list[list[int]] = []

    class Listener(ScriptedDrafter):
        def propose(self, context: ProposeContext) -> DraftTree:
            asked.extend(context.token_ids(request).copy() for request in context.requests)
            return super().propose(context)

    driver = Driver(toy, Listener(draw_right, [greedy]))
    driver.enter(0)
    for _ in range((len(PROMPT) - 1) // chunk):
        assert driver.step([0], num_tokens=chunk) == [RequestResult(0, [], 0, None, None)]
    assert asked == []  # nor is anything drafted for it
    assert driver.step([0], num_tokens=chunk)[0].token_ids == greedy[9:10]
    assert asked == [greedy[:10]]


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
def test_a_text_and_its_kv_do_not_depend_on_drafts(draw: str, toy: Path, greedy: list[int]) -> None:
    """A rejected node leaves no trace: after any drafts the committed KV is that of plain decoding."""
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
    assert driver.step([0], max_draft_tokens=5) == [RequestResult(0, greedy[10:16], 5, None, None)]
    assert driver.step([0], max_draft_tokens=0) == [RequestResult(0, greedy[16:17], 0, None, None)]


def test_a_wide_tree_is_counted_whole(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy, ScriptedDrafter(draw_right_last, [greedy]))
    driver.enter(0)
    driver.step([0])
    assert driver.step([0]) == [RequestResult(0, greedy[10:14], 12, None, None)]


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_no_slot_beyond_the_plans_limit_is_written(limit: int, toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy, ScriptedDrafter(draw_right, [[*greedy[:10], *[3] * 30]]))  # long and wrong
    driver.enter(0)
    driver.step([0])
    driver.step([0], max_draft_tokens=limit)
    written = driver.worker._runner.kv.pool.flatten(2).any(-1).all(0).nonzero().flatten().tolist()
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
def test_nonsense_from_a_drafter_costs_only_its_draft(tree: TreeLists, toy: Path, greedy: list[int]) -> None:
    drafter = ScriptedDrafter(lambda root, future, random: TreeLists([root, *tree.tokens[1:]], tree.parents))  # noqa: ARG005
    driver = Driver(toy, drafter)
    driver.enter(0)
    assert driver.run(0, 10) == greedy[9:19]


def test_blocks_added_later_are_used(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy)
    row = NewRequest(0, PROMPT, len(PROMPT), 0, [9, 3, 30], GREEDY, "")
    driver.worker.execute(StepPlan(0, [], [row], [ScheduledRow(0, 100, at_most(0), [])]))
    for i in range(10, 30):
        added = [35 + i] if (i - 1) % PAGE == 0 and i > 3 * PAGE else []
        [result] = driver.worker.execute(StepPlan(i, [], [], [ScheduledRow(0, 1, at_most(0), added)])).rows
        assert result.token_ids == [greedy[i]]


def test_a_cached_prefix_is_read_and_not_computed(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy)
    driver.enter(0)
    driver.step([0])
    again = NewRequest(2, PROMPT, len(PROMPT), 2 * PAGE, [1, 2, 60], GREEDY, "")
    [row] = driver.worker.execute(StepPlan(9, [], [again], [ScheduledRow(2, 100, at_most(0), [])])).rows
    assert row.token_ids == greedy[9:10]


# ---- rows are alone -------------------------------------------------------------------------------------------------

OTHERS = [PROMPT, [0, 20, 21], [0, *range(10, 40)]]


def together(driver: Driver, num_steps: int, poison: int | None) -> dict[int, list[RequestResult]]:
    """Results by slot of three sampled requests; the KV of slot `poison` is spoilt after the second step."""
    for slot, prompt in enumerate(OTHERS):
        driver.enter(slot, prompt, SAMPLED._replace(seed=slot))
    results: dict[int, list[RequestResult]] = {slot: [] for slot in range(len(OTHERS))}
    active = sorted(results)
    for step in range(num_steps):
        if step == 2 and poison is not None:
            driver.kv(poison, 2)[1] = torch.nan
        for row in driver.step(active):
            results[row.slot].append(row)
            if row.error:
                active.remove(row.slot)
                driver.free(row.slot)
    return results


@pytest.mark.parametrize("draw", ["empty", "random"])
@pytest.mark.parametrize("poison", [0, 1, 2])
def test_a_broken_row_ends_and_its_neighbours_do_not_notice(draw: str, poison: int, toy: Path) -> None:
    clean, spoilt = (together(Driver(toy, ScriptedDrafter(DRAWS[draw])), 12, bad) for bad in (None, poison))
    assert spoilt[poison][-1] == RequestResult(poison, [], 0, None, NOT_A_NUMBER)
    assert len(spoilt[poison]) == 3
    for slot in set(range(len(OTHERS))) - {poison}:
        texts = [[token for row in results[slot] for token in row.token_ids] for results in (clean, spoilt)]
        length = min(map(len, texts))  # random drafts are others without the row, so steps differ; tokens may not
        assert length >= 12
        assert texts[0][:length] == texts[1][:length]
        assert all(row.error is None for row in spoilt[slot])


def test_a_chunk_that_is_not_a_number_ends_its_request(toy: Path) -> None:
    driver = Driver(toy)
    driver.enter(0)
    driver.step([0], num_tokens=3)
    driver.kv(0, 1)[:] = torch.nan
    assert driver.step([0], num_tokens=3) == [RequestResult(0, [], 0, None, NOT_A_NUMBER)]


def test_blocks_of_a_broken_row_serve_the_next_request(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy)
    driver.enter(0)
    driver.step([0])
    driver.worker._runner.kv.pool[:, PAGE:] = torch.nan  # all but the null block
    assert driver.step([0])[0].error == NOT_A_NUMBER
    driver.free(0)
    driver.enter(0)
    assert driver.run(0, 8) == greedy[9:17]


# ---- what a drafter gets --------------------------------------------------------------------------------------------

LAYERS = (1, 0, 2)  # of the toy's two: entering the second, entering the first, after the last norm


class Seen(NamedTuple):
    """A request as a drafter saw it."""

    request: DraftRequest
    token_ids: list[int]
    num_prompt_tokens: int
    cache_salt: str
    sampling: SamplingOptions
    kv_slots: list[int]  # from the device, up to `end`


class SeenContext(NamedTuple):
    requests: list[Seen]
    unfinished: list[Seen]
    aux_hidden_states: torch.Tensor | None

    @property
    def slots(self) -> list[int]:
        return [seen.request.slot for seen in self.requests]


class Recorder(ScriptedDrafter):
    """Keeps copies of all that it gets."""

    aux_hidden_state_layers = LAYERS

    def __init__(self, draw: str, texts: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(DRAWS[draw], texts)
        self.seen: list[SeenContext] = []

    def propose(self, context: ProposeContext) -> DraftTree:
        drafted, unfinished = (
            [self._copy(context, request) for request in part] for part in (context.requests, context.unfinished)
        )
        self.seen.append(SeenContext(drafted, unfinished, context.aux_hidden_states))
        return super().propose(context)

    def _copy(self, context: ProposeContext, request: DraftRequest) -> Seen:
        table, slot = context.table, request.slot
        state = table.states[slot]
        known = table.token_ids[slot, : len(state.token_ids)].tolist()
        assert known == state.token_ids == context.token_ids(request)  # the device's copy is the host's
        assert int(table.num_tokens[slot]) == len(known)
        assert int(table.seeds[slot]) == state.sampling.options.seed
        kv_slots = table.kv_slots[slot, : request.end].tolist()
        return Seen(request, known, state.num_prompt_tokens, state.cache_salt, state.sampling.options, kv_slots)


def true_aux_hidden_states(model: Llama, seen: Seen) -> torch.Tensor:
    """Of the tokens a step computed, by one forward over all tokens without a cache."""
    tokens = torch.tensor(seen.token_ids)
    with torch.inference_mode():
        _, aux_hidden_states = model(tokens, torch.arange(len(tokens)), attend_to_the_past, LAYERS)
    return torch.cat(aux_hidden_states, -1)[seen.request.start : seen.request.end]


def assert_true_aux_hidden_states(driver: Driver, context: SeenContext) -> None:
    expected = [true_aux_hidden_states(driver.worker.model, seen) for seen in context.requests + context.unfinished]
    torch.testing.assert_close(context.aux_hidden_states, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_a_drafter_gets_the_request_and_what_was_computed(toy: Path, greedy: list[int]) -> None:
    recorder = Recorder("empty")
    driver = Driver(toy, recorder)
    driver.enter(2, sampling=SAMPLED._replace(temperature=0.0, seed=-5))
    driver.step([2])
    [context] = recorder.seen
    [seen] = context.requests
    assert (seen.token_ids, seen.num_prompt_tokens, seen.cache_salt) == (greedy[:10], len(PROMPT), "")
    assert seen.request[:3] == (2, 0, len(PROMPT))
    assert (seen.sampling.seed, seen.sampling.temperature) == (-5, 0.0)
    first = (BLOCKS * 2 + 1) * PAGE
    assert seen.kv_slots == list(range(first, first + len(PROMPT)))
    assert context.unfinished == []
    assert_true_aux_hidden_states(driver, context)


@pytest.mark.parametrize("draw", DRAWS)
def test_accepted_nodes_come_with_their_own_hidden_states(draw: str, toy: Path, greedy: list[int]) -> None:
    """Step after step without a gap, whatever the tree's shape: of right-last no path is a beginning of its tree."""
    recorder = Recorder(draw, [greedy])
    driver = Driver(toy, recorder)
    driver.enter(1)
    driver.run(1, 20)
    end = 0
    for context in recorder.seen:
        [seen] = context.requests
        assert seen.request[1:3] == (end, len(seen.token_ids) - 1)
        assert_true_aux_hidden_states(driver, context)
        end = seen.request.end


@pytest.mark.parametrize("limit", [DraftLimit(0, 9), DraftLimit(9, 0), DraftLimit(3, 9), DraftLimit(9, 2)])
def test_a_drafter_gets_the_draft_limit(limit: DraftLimit, toy: Path) -> None:
    """A request that allows no drafts is read, so that its drafts may begin at any step, and not drafted for."""
    recorder = Recorder("random")
    driver = Driver(toy, recorder)
    row = NewRequest(2, PROMPT, len(PROMPT), 0, [1, 2, 60], GREEDY, "")
    driver.worker.execute(StepPlan(9, [], [row], [ScheduledRow(2, 100, limit, [])]))
    driver.worker.propose()
    [context] = recorder.seen
    [seen] = context.requests or context.unfinished
    assert bool(context.requests) == (min(limit) > 0)
    assert (seen.request.draft_limit.num_steps, seen.request.end) == (min(limit), len(PROMPT))
    assert_true_aux_hidden_states(driver, context)


@pytest.mark.parametrize("chunk", [1, 4, 8])
def test_a_chunk_is_unfinished(chunk: int, toy: Path) -> None:
    recorder = Recorder("random")
    driver = Driver(toy, recorder)
    driver.enter(0)
    for start in range(0, len(PROMPT), chunk):
        driver.step([0], num_tokens=chunk)
        context = recorder.seen[-1]
        is_last = start + chunk >= len(PROMPT)
        [seen] = context.requests if is_last else context.unfinished
        assert len(context.requests + context.unfinished) == 1
        assert seen.request[1:3] == (start, min(start + chunk, len(PROMPT)))
        assert seen.token_ids[: len(PROMPT)] == PROMPT  # so the token after a chunk is known
        assert_true_aux_hidden_states(driver, context)


def test_aux_hidden_states_of_ready_rows_come_before_those_of_unfinished_ones(toy: Path) -> None:
    recorder = Recorder("random")
    driver = Driver(toy, recorder)
    for slot, prompt in enumerate([PROMPT, [0, 20], [0, *range(10, 30)], [7]]):
        driver.enter(slot, prompt, SAMPLED)
    for order in ([2, 1, 0, 3], [0, 3, 2, 1], [3, 2, 1, 0], [1, 0]):
        driver.step(order, num_tokens=4)
        context = recorder.seen[-1]
        slots = [seen.request.slot for seen in context.requests + context.unfinished]
        assert sorted(slots) == sorted(order)
        assert context.slots == [slot for slot in order if slot in context.slots]
        assert_true_aux_hidden_states(driver, context)
    assert [len(context.unfinished) for context in recorder.seen] == [2, 2, 1, 0]


def test_what_the_cache_held_was_not_computed(toy: Path) -> None:
    recorder = Recorder("empty")
    driver = Driver(toy, recorder)
    driver.enter(0)
    driver.step([0])
    again = NewRequest(2, PROMPT, len(PROMPT), 2 * PAGE, [1, 2, 60], GREEDY, "tenant")
    driver.worker.execute(StepPlan(9, [], [again], [ScheduledRow(2, 100, at_most(1), [])]))
    driver.worker.propose()
    [seen] = recorder.seen[-1].requests
    assert (*seen.request[1:3], seen.cache_salt) == (2 * PAGE, len(PROMPT), "tenant")
    assert seen.kv_slots == [*range(PAGE, 3 * PAGE), 60 * PAGE]
    assert_true_aux_hidden_states(driver, recorder.seen[-1])


def test_a_broken_request_is_not_drafted_for(toy: Path) -> None:
    recorder = Recorder("random")
    driver = Driver(toy, recorder)
    together(driver, 4, poison=1)
    assert [context.slots for context in recorder.seen] == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2]]
    for context in recorder.seen:
        assert_true_aux_hidden_states(driver, context)


def test_a_drafter_without_layers_gets_no_hidden_states(toy: Path) -> None:
    contexts: list[ProposeContext] = []

    class Listener(ScriptedDrafter):
        def propose(self, context: ProposeContext) -> DraftTree:
            contexts.append(context)
            return super().propose(context)

    driver = Driver(toy, Listener(DRAWS["random"]))
    driver.enter(0)
    driver.step([0])
    assert [context.aux_hidden_states for context in contexts] == [None]


# ---- slots come and go ----------------------------------------------------------------------------------------------


def test_a_freed_slot_is_another_requests_in_the_same_step(toy: Path, greedy: list[int]) -> None:
    driver = Driver(toy, ScriptedDrafter(draw_right, [greedy]))
    driver.enter(0, [0, 30, 31, 32], SAMPLED)
    driver.run(0, 5)
    driver.free(0)
    driver.enter(0)
    assert driver.run(0, 20)[:20] == greedy[9:29]


def test_a_freed_slots_request_is_forgotten(toy: Path) -> None:
    driver = Driver(toy)
    driver.enter(0)
    driver.step([0])
    driver.free(0)
    assert driver.step([]) == []
    with pytest.raises(KeyError):
        driver.step([0])


def test_after_the_last_request_ended_nothing_is_drafted(toy: Path) -> None:
    """The ended request's text was once proposed for again, and lay in wait for the next one in its slot."""
    released, contexts = [], []

    class Listener(ScriptedDrafter):
        def propose(self, context: ProposeContext) -> DraftTree:
            contexts.append([request.slot for request in context.requests])
            return super().propose(context)

        def release(self, slots: Sequence[int]) -> None:
            released.extend(slots)

    driver = Driver(toy, Listener(DRAWS["random"]))
    driver.enter(3)
    driver.step([3])
    driver.free(3)
    driver.step([])
    assert released == [3]
    assert contexts == [[3], []]


def test_a_resumed_request_goes_on_where_it_was(toy: Path) -> None:
    """After preemption a row enters with its own output; penalties count it, the noise is that of its positions."""
    sampling = SAMPLED._replace(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
    driver = Driver(toy)
    driver.enter(0, PROMPT, sampling)
    text = PROMPT + driver.run(0, 20)
    for length in (len(PROMPT) + 1, len(text) - 6):
        row = NewRequest(1, text[:length], len(PROMPT), 0, list(range(17, 33)), sampling, "")
        resumed = Driver(toy)
        [result] = resumed.worker.execute(StepPlan(0, [], [row], [ScheduledRow(1, 100, at_most(0), [])])).rows
        assert result.token_ids + resumed.run(1, 5) == text[length : length + 6]


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_rows_and_chunks_gives_the_same_texts(seed: int, toy: Path) -> None:
    """Rows enter at any time, in any order, with any chunk and any draft limit."""
    random = Random(seed)
    driver = Driver(toy, ScriptedDrafter(DRAWS["random"]))
    texts: dict[int, list[int]] = {}
    while not texts or min(map(len, texts.values())) < 8 or len(texts) < len(OTHERS):
        if len(texts) < len(OTHERS) and random.random() < 0.5:
            driver.enter(len(texts), OTHERS[len(texts)], SAMPLED._replace(seed=len(texts)))
            texts[len(texts)] = []
        active = [slot for slot in texts if len(texts[slot]) < 16 and random.random() < 0.7]
        for row in driver.step(random.sample(active, len(active)), random.randint(1, 9), random.randint(0, 6)):
            texts[row.slot] += row.token_ids
    for slot, text in texts.items():
        alone = Driver(toy)
        alone.enter(slot, OTHERS[slot], SAMPLED._replace(seed=slot))
        assert text == alone.run(slot, len(text))


def test_a_step_without_rows_is_a_step(toy: Path) -> None:
    driver = Driver(toy)
    assert driver.step([]) == []
    assert np.isfinite(driver.worker.execute(StepPlan(5, [], [], [])).times.prepare)
