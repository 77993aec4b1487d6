"""An Executor without a model that keeps rows as a worker does and asserts what every plan must hold.

Its target continues a text by `next_token`, and `accepts` says how many drafts each verify proposes and
keeps, in turn. A request is known to it by its seed, so tests give every request another one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from tokenizers import Tokenizer, decoders, models

from specray.config import EngineConfig
from specray.engine.engine import Engine
from specray.engine.executor import Capacity
from specray.engine.request import EngineRequest
from specray.outputs import RequestOutput
from specray.sampling_params import SamplingParams
from specray.step import NewRequest, RequestResult, ScheduledRow, StepPlan, StepResult, StepTimes

VOCAB_SIZE = 32
EOS = 1
BROKEN = "the row's logits are NaN"


def next_token(token_ids: Sequence[int]) -> int:
    """What the target says after `token_ids`: any function of all of them, so that a lost or doubled one is seen."""
    return hash(tuple(token_ids)) % VOCAB_SIZE


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """At most `num_tokens` tokens after `prompt`, up to the end token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def letters_tokenizer() -> Tokenizer:
    """Token i is one letter."""
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
    raise AssertionError(f"still working after {max_steps} steps")


def free_blocks_are_accounted_for(engine: Engine) -> None:
    """Each block is free, cached or held by one request."""
    scheduler = engine.scheduler
    held = [block for running in scheduler.running for block in running.private_blocks()]
    assert len(set(held)) == len(held)
    assert scheduler.pool.num_free + scheduler.cache.num_cached + len(held) == scheduler.pool.num_usable


@dataclass
class Row:
    """One slot of the worker."""

    seed: int
    salt: str
    tokens: list[int]
    num_computed: int
    blocks: list[int]
    is_new: bool = True


@dataclass
class Ledger:
    """What a test may compare the engine's counters with."""

    steps: int = 0
    entries: Counter[int] = field(default_factory=Counter)  # by seed: how often the request got a row
    cached: dict[int, int] = field(default_factory=dict)  # by seed: tokens found in the cache at its first row
    first_tokens: set[int] = field(default_factory=set)  # seeds whose prompt is answered: from now on they verify
    verifies: Counter[int] = field(default_factory=Counter)  # by seed
    drafts: Counter[int] = field(default_factory=Counter)  # by seed
    accepted: Counter[int] = field(default_factory=Counter)  # by seed
    trees: int = 0  # verifies with at least one draft
    per_position: Counter[str] = field(default_factory=Counter)


class FakeExecutor:
    """Checks and answers plans; `broken` seeds get an error row, `limits` are the requests' longest lengths."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int = 40,
        max_draft_tokens: int = 0,
        accepts: Sequence[tuple[int, int]] = ((0, 0),),
        context_length: int = 48,
        reads_next_token: bool = False,
    ) -> None:
        self.capacity = Capacity(num_blocks, max_draft_tokens, context_length, VOCAB_SIZE, [EOS], reads_next_token)
        self.rows: dict[int, Row] = {}
        self.limits: dict[int, int] = {}
        self.broken: set[int] = set()
        self.ledger = Ledger()
        self._config = config
        self._accepts: Iterator[tuple[int, int]] = cycle(accepts)
        self._results: list[StepResult] = []

    @property
    def seeds(self) -> list[int]:
        return sorted(row.seed for row in self.rows.values())

    def submit(self, plan: StepPlan) -> None:
        assert plan.rows or plan.freed_slots, "an empty plan is not worth a round trip"
        self.ledger.steps += 1
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
        results = [self._answer(step) for step in plan.rows]
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
        row = Row(new.sampling.seed, new.cache_salt, list(new.token_ids), new.num_computed_tokens, list(new.block_ids))
        check_block_ids(row.blocks, self.capacity.num_blocks)
        self.rows[new.slot] = row
        self.ledger.entries[row.seed] += 1
        self.ledger.cached.setdefault(row.seed, new.num_computed_tokens)

    def _check_budgets(self, plan: StepPlan) -> None:
        slots = [step.slot for step in plan.rows]
        assert len(set(slots)) == len(slots)
        rows = [(self.rows[step.slot], step.num_tokens) for step in plan.rows]
        assert all(1 <= count <= len(row.tokens) - row.num_computed for row, count in rows)
        prefill = [count for row, count in rows if row.is_new or len(row.tokens) - row.num_computed > 1]
        assert all(count <= self._config.chunked_prefill_size for count in prefill)
        assert sum(prefill) <= self._config.max_prefill_tokens

    def _extend(self, step: ScheduledRow) -> None:
        row = self.rows[step.slot]
        row.blocks += step.new_block_ids
        row.is_new = False
        check_block_ids(row.blocks, self.capacity.num_blocks)

    def _check_writes(self, step: ScheduledRow) -> None:
        """Everything the row may write lies in its own blocks; what it shares is full, computed and equal."""
        row, size = self.rows[step.slot], self._config.page_size
        end = row.num_computed + step.num_tokens + step.draft_limit.num_tokens
        assert end <= len(row.blocks) * size, "a token is written beyond the row's blocks"
        assert 0 <= step.draft_limit.num_tokens <= self.capacity.max_draft_tokens
        if step.draft_limit.num_tokens:
            assert row.num_computed + step.num_tokens == len(row.tokens), "only a row that verifies may draft"
            assert len(row.tokens) + step.draft_limit.num_tokens + 1 <= self.limits[row.seed]
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

    def _answer(self, step: ScheduledRow) -> RequestResult:
        row = self.rows[step.slot]
        if row.seed in self.broken:
            return RequestResult(step.slot, [], 0, None, BROKEN)
        row.num_computed += step.num_tokens
        if row.num_computed < len(row.tokens):
            return RequestResult(step.slot, [], 0, None, None)
        wanted, kept = next(self._accepts) if row.seed in self.ledger.first_tokens else (0, 0)
        num_drafts = min(wanted, step.draft_limit.num_tokens)
        num_accepted = min(kept, num_drafts)
        said: list[int] = []
        for _ in range(num_accepted + 1):
            said.append(next_token(row.tokens + said))
        row.tokens += said
        row.num_computed += num_accepted
        self._note(row.seed, num_drafts, num_accepted)
        return RequestResult(step.slot, said, num_drafts, None, None)

    def _note(self, seed: int, num_drafts: int, num_accepted: int) -> None:
        if seed not in self.ledger.first_tokens:
            self.ledger.first_tokens.add(seed)
            return
        self.ledger.verifies[seed] += 1
        self.ledger.drafts[seed] += num_drafts
        self.ledger.accepted[seed] += num_accepted
        self.ledger.trees += num_drafts > 0
        self.ledger.per_position.update(str(position) for position in range(num_accepted))


def check_block_ids(blocks: list[int], num_blocks: int) -> None:
    assert len(set(blocks)) == len(blocks), f"a block is in the row twice: {blocks}"
    assert all(0 < block < num_blocks for block in blocks)
