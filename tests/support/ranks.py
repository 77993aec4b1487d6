"""An Executor without a model, which checks every plan against a simulated KV pool and generates a known text.

The simulated KV of a token are the tokens that it depends on, so that reading a wrong block, a stale KV slot or a block
shared by different texts fails at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from specray.config import EngineConfig
from specray.engine.executor import Capacity
from specray.outputs import TokenLogprob
from specray.step import NewRequest, RequestResult, ScheduledRequest, StepPlan, StepResult, StepTimes

# what follows `token_ids`, one token
Text = Callable[[list[int]], int]


@dataclass(eq=False)
class SimulatedRequest:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: list[int]
    cache_salt: str


class SimulatedRanks:
    """Executor that generates `text` and accepts a random number of drafts."""

    def __init__(self, config: EngineConfig, capacity: Capacity, text: Text, random: Random) -> None:
        self.capacity = capacity
        self.num_steps = 0
        self.largest_step = 0
        self._config = config
        self._text = text
        self._random = random
        self._rows: dict[int, SimulatedRequest] = {}
        self._kv: dict[int, tuple[str, tuple[int, ...]]] = {}  # KV slot -> salt and tokens it depends on
        self._results: list[StepResult] = []

    def submit(self, plan: StepPlan) -> None:
        self._check(plan)
        for slot in plan.freed_slots:
            del self._rows[slot]
        for new in plan.new_requests:
            self._enter(new)
        self.num_steps += 1
        self._results.append(StepResult(plan.step_id, [self._run(row) for row in plan.rows], StepTimes(0, 0, 0, 0)))

    def collect(self) -> StepResult:
        return self._results.pop(0)

    def close(self) -> None:
        pass

    def _check(self, plan: StepPlan) -> None:
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots) <= self._config.max_running_requests
        assert all(1 <= row.num_tokens <= self._config.chunked_prefill_size for row in plan.rows)
        prefill = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        assert prefill <= self._config.max_prefill_tokens
        self.largest_step = max(self.largest_step, prefill)
        assert plan.rows or plan.freed_slots

    def _enter(self, new: NewRequest) -> None:
        assert new.slot not in self._rows
        assert 0 <= new.slot < self._config.max_running_requests
        assert new.num_computed_tokens < len(new.token_ids)
        row = SimulatedRequest(
            list(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens, list(new.block_ids), new.cache_salt
        )
        self._rows[new.slot] = row

    def _run(self, step: ScheduledRequest) -> RequestResult:
        row = self._rows[step.slot]
        row.block_ids += step.new_block_ids
        assert len(set(row.block_ids)) == len(row.block_ids)
        assert all(0 < block < self.capacity.num_blocks for block in row.block_ids)
        known = min(step.num_tokens, len(row.token_ids) - row.num_computed)
        assert known > 0
        self._read(row)
        start = row.num_computed
        row.num_computed += known
        if row.num_computed < len(row.token_ids):
            self._write(row, start)
            return RequestResult(step.slot, [], 0, None, None)
        return self._sample(step, row, start)

    def _sample(self, step: ScheduledRequest, row: SimulatedRequest, start: int) -> RequestResult:
        """Write a random number of drafts, accept some, and leave the KV of rejected ones."""
        assert 0 <= step.draft_limit.num_tokens <= self.capacity.max_draft_tokens
        num_drafts = self._random.randint(0, step.draft_limit.num_tokens)
        num_accepted = self._random.randint(0, num_drafts)
        root = row.num_computed - 1
        tokens: list[int] = []
        for _ in range(num_accepted + 1):
            tokens.append(self._text(row.token_ids + tokens))
        row.token_ids += tokens
        for position in range(root + 1, root + 1 + num_drafts):
            self._kv[self._slot(row, position)] = ("rejected", ())
        row.num_computed += num_accepted
        self._write(row, start)
        assert len(row.token_ids) <= self.capacity.context_length
        return RequestResult(step.slot, tokens, num_drafts, [TokenLogprob(t, -float(t), []) for t in tokens], None)

    def _read(self, row: SimulatedRequest) -> None:
        for position in range(row.num_computed):
            seen = self._kv.get(self._slot(row, position))
            assert seen == self._state(row, position), (position, seen)

    def _write(self, row: SimulatedRequest, start: int) -> None:
        for position in range(start, row.num_computed):
            self._kv[self._slot(row, position)] = self._state(row, position)

    def _state(self, row: SimulatedRequest, position: int) -> tuple[str, tuple[int, ...]]:
        return row.cache_salt, tuple(row.token_ids[: position + 1 + self.capacity.reads_next_token])

    def _slot(self, row: SimulatedRequest, position: int) -> int:
        size = self._config.page_size
        assert position // size < len(row.block_ids), "a token is written beyond its row's blocks"
        return row.block_ids[position // size] * size + position % size
