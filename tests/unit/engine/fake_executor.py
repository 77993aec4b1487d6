"""An Executor without a model: it keeps rows as a worker does and checks the invariants of every plan.

Its target model is the function `next_token`. `accepts` lists, for successive verifications, the numbers of drafted and
accepted tokens. Requests are identified by their seeds, so each request of a test needs its own seed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from tokenizers import Tokenizer, decoders, models

from specray.config import EngineConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity
from specray.outputs import RequestOutput
from specray.sampling_params import SamplingParams
from specray.step import NewRequest, RequestResult, ScheduledRequest, StepPlan, StepResult, StepTimes

VOCAB_SIZE = 32
EOS = 1
ROW_ERROR = "the row's logits are NaN"


def next_token(token_ids: Sequence[int]) -> int:
    """The target's next token: a function of all `token_ids`, so that a missing or repeated one changes the output."""
    return hash(tuple(token_ids)) % VOCAB_SIZE


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The expected output for `prompt`: up to `num_tokens` tokens, or up to the end token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def letters_tokenizer() -> Tokenizer:
    """Each token is one character."""
    tokenizer = Tokenizer(models.WordLevel({chr(0x61 + i): i for i in range(VOCAB_SIZE)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def request(seed: int, prompt: Sequence[int], max_tokens: int | None = None, salt: str = "") -> EngineRequest:
    return EngineRequest(f"r{seed}", list(prompt), SamplingParams(seed=seed, max_tokens=max_tokens), salt)


def run_to_end(engine: Engine, max_steps: int = 2000) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
    raise AssertionError(f"requests left after {max_steps} steps")


def check_block_accounting(engine: Engine) -> None:
    """Check that each block is free, cached or held by exactly one request."""
    scheduler = engine.scheduler
    held = [block for running in scheduler.running for block in running.private_blocks()]
    assert len(set(held)) == len(held)
    assert scheduler.pool.num_free + scheduler.cache.num_cached + len(held) == scheduler.pool.num_usable
    states = scheduler.states
    reserved = [row for each in scheduler.running for planned in each.in_flight for _, row in planned.state_copies]
    assert len(set(reserved)) == len(reserved)
    assert states.num_free + states.num_stored + len(reserved) == (states.num_rows or 0)


@dataclass
class RequestState:
    """A request in its slot."""

    seed: int
    salt: str
    tokens: list[int]
    num_computed: int
    blocks: list[int]
    is_new: bool = True


@dataclass
class ExecutorCounts:
    """Counts to compare the engine's metrics with."""

    steps: int = 0
    entries: Counter[int] = field(default_factory=Counter)  # by seed: how often the request was given a slot
    cached: dict[int, int] = field(default_factory=dict)  # by seed: cached tokens when it first started
    first_tokens: set[int] = field(default_factory=set)  # seeds that have emitted their first token
    verifies: Counter[int] = field(default_factory=Counter)  # by seed
    drafts: Counter[int] = field(default_factory=Counter)  # by seed
    accepted: Counter[int] = field(default_factory=Counter)  # by seed
    trees: int = 0  # verifies with at least one draft
    per_position: Counter[str] = field(default_factory=Counter)


class FakeExecutor:
    """Checks and runs plans. Rows of `broken` seeds fail; `max_lengths` are the maximum lengths by seed."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int = 40,
        max_draft_tokens: int = 0,
        accepts: Sequence[tuple[int, int]] = ((0, 0),),
        context_length: int = 48,
        reads_next_token: bool = False,
        max_plans: int = 1,
        num_stored_states: int | None = None,
    ) -> None:
        self.capacity = Capacity(
            num_blocks,
            max_draft_tokens,
            context_length,
            VOCAB_SIZE,
            [EOS],
            reads_next_token,
            num_stored_states=num_stored_states,
            max_plans=max_plans,
        )
        self.stored_states: dict[int, tuple[str, list[int]]] = {}  # by row: of which tenant's text
        self.rows: dict[int, RequestState] = {}
        self.max_lengths: dict[int, int] = {}
        self.broken: set[int] = set()
        self.counts = ExecutorCounts()
        self._config = config
        self._accepts: Iterator[tuple[int, int]] = cycle(accepts)
        self._results: list[StepResult] = []

    @property
    def seeds(self) -> list[int]:
        return sorted(row.seed for row in self.rows.values())

    def submit(self, plan: StepPlan) -> None:
        assert plan.rows or plan.freed_slots, "the plan is empty"
        self.counts.steps += 1
        for slot in plan.freed_slots:
            del self.rows[slot]
        for new in plan.new_requests:
            self._enter(new)
        assert len(self.rows) <= self._config.max_running_requests
        self._check_budgets(plan)
        for step in plan.rows:
            self._extend(step)
        for step in plan.rows:
            self._check_writes(step)
        starts = [self.rows[step.slot].num_computed for step in plan.rows]
        results = [self._run(step) for step in plan.rows]
        for step, start in zip(plan.rows, starts, strict=True):
            self._store_states(step, start)
        self._results.append(StepResult(plan.step_id, results, StepTimes(0.0, 0.0, 0.0, 0.0)))

    def collect(self) -> StepResult:
        return self._results.pop(0)

    def close(self) -> None:
        pass

    def _enter(self, new: NewRequest) -> None:
        size = self._config.page_size
        assert 0 <= new.slot < self._config.max_running_requests
        assert new.slot not in self.rows
        assert new.num_computed_tokens % size == 0
        assert new.num_computed_tokens < len(new.token_ids) <= len(new.block_ids) * size
        row = RequestState(
            new.sampling.seed, new.cache_salt, list(new.token_ids), new.num_computed_tokens, list(new.block_ids)
        )
        check_block_ids(row.blocks, self.capacity.num_blocks)
        if self.capacity.num_stored_states is not None and row.num_computed:
            assert self.stored_states[new.stored_state] == (row.salt, row.tokens[: row.num_computed])
        self.rows[new.slot] = row
        self.counts.entries[row.seed] += 1
        self.counts.cached.setdefault(row.seed, new.num_computed_tokens)

    def _check_budgets(self, plan: StepPlan) -> None:
        slots = [step.slot for step in plan.rows]
        assert len(set(slots)) == len(slots)
        rows = [(self.rows[step.slot], step.num_tokens) for step in plan.rows]
        rows = [(row, count) for row, count in rows if row.seed not in self.broken]  # they do not advance
        assert all(1 <= count <= len(row.tokens) - row.num_computed for row, count in rows)
        prefill = [count for row, count in rows if row.is_new or len(row.tokens) - row.num_computed > 1]
        assert all(count <= self._config.chunked_prefill_size for count in prefill)
        assert sum(prefill) <= self._config.max_prefill_tokens

    def _extend(self, step: ScheduledRequest) -> None:
        row = self.rows[step.slot]
        row.blocks += step.new_block_ids
        row.is_new = False
        check_block_ids(row.blocks, self.capacity.num_blocks)

    def _check_writes(self, step: ScheduledRequest) -> None:
        """Check that a row writes to its own blocks only, and that shared blocks are full, computed and equal."""
        row, size = self.rows[step.slot], self._config.page_size
        end = row.num_computed + step.num_tokens + step.draft_limit.num_tokens
        assert end <= len(row.blocks) * size, "a token is written beyond the row's blocks"
        assert 0 <= step.draft_limit.num_tokens <= self.capacity.max_draft_tokens
        if step.draft_limit.num_tokens and row.seed not in self.broken:
            assert row.num_computed + step.num_tokens == len(row.tokens), "only a row that verifies may draft"
            assert len(row.tokens) + step.draft_limit.num_tokens <= self.capacity.context_length
            if self.capacity.max_plans == 1:  # else an earlier step may accept more than the plan could know
                assert len(row.tokens) + step.draft_limit.num_tokens + 1 <= self.max_lengths[row.seed]
        others = [other for other in self.rows.values() if other is not row]
        for index, block in enumerate(row.blocks):
            for other in others:
                if block in other.blocks:
                    full = (index + 1) * size
                    assert other.salt == row.salt
                    assert other.blocks.index(block) == index
                    assert full <= min(row.num_computed, other.num_computed)
                    needed = full + self.capacity.reads_next_token
                    assert other.tokens[:needed] == row.tokens[:needed]

    def _run(self, step: ScheduledRequest) -> RequestResult:
        row = self.rows[step.slot]
        if row.seed in self.broken:
            return RequestResult(step.slot, [], 0, None, ROW_ERROR)
        row.num_computed += step.num_tokens
        if row.num_computed < len(row.tokens):
            return RequestResult(step.slot, [], 0, None, None)
        num_wanted, num_kept = next(self._accepts) if row.seed in self.counts.first_tokens else (0, 0)
        num_drafts = min(num_wanted, step.draft_limit.num_tokens)
        num_accepted = min(num_kept, num_drafts)
        emitted: list[int] = []
        for _ in range(num_accepted + 1):
            emitted.append(next_token(row.tokens + emitted))
        num_output = self._num_kept(row, emitted)
        row.tokens += emitted
        row.num_computed += num_accepted
        self._count(row.seed, num_drafts, num_output - 1)
        return RequestResult(step.slot, emitted, num_drafts, None, None)

    def _store_states(self, step: ScheduledRequest, start: int) -> None:
        row, first = self.rows[step.slot], self._config.max_running_requests
        for place, stored in step.state_copies:
            assert first <= stored < first + (self.capacity.num_stored_states or 0)
            if start < place <= row.num_computed:
                self.stored_states[stored] = row.salt, row.tokens[:place]

    def _num_kept(self, row: RequestState, emitted: Sequence[int]) -> int:
        """Of the tokens that follow the row's, those up to the end of its output."""
        end = emitted.index(EOS) + 1 if EOS in emitted else len(emitted)
        return min(end, self.max_lengths.get(row.seed, end + len(row.tokens)) - len(row.tokens))

    def _count(self, seed: int, num_drafts: int, num_accepted: int) -> None:
        if seed not in self.counts.first_tokens:
            self.counts.first_tokens.add(seed)
            return
        self.counts.verifies[seed] += 1
        self.counts.drafts[seed] += num_drafts
        self.counts.accepted[seed] += num_accepted
        self.counts.trees += num_drafts > 0
        self.counts.per_position.update(str(position) for position in range(num_accepted))


def check_block_ids(blocks: list[int], num_blocks: int) -> None:
    assert len(set(blocks)) == len(blocks), f"a row lists a block twice: {blocks}"
    assert all(0 < block < num_blocks for block in blocks)
