"""What a drafter would have done on logged requests: its trees at each step, compared with the text that is known.

One seed gives one text whatever drafts it, so the target samples nothing here. It computes each text once, in one pass,
for the hidden states that a head reads; n-grams need not even that. The drafter then drafts after every token at which
a step would have begun, with the rows, limits and noise that it has in a server, and the text decides which of its
nodes are accepted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from specray.config import MAX_TREE_NODES
from specray.engine.engine import Engine
from specray.engine.new_request import sampling_options
from specray.engine.request_log import LoggedRequest
from specray.errors import ConfigError
from specray.llm import LLM
from specray.spec_decode.draft_tree import ROOT, TreeLists
from specray.spec_decode.drafter import TreeRows
from specray.spec_decode.no_drafts import NoDrafts
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.step import DraftLimit, NewRequest, ScheduledRequest, StepPlan
from specray.worker.local import LocalExecutor

SLOT = 0  # of the request table; requests are replayed one at a time
NO_DRAFTS = DraftLimit(0, 0)


@dataclass(slots=True)
class Replayed:
    """The verify steps of one arm, in order."""

    num_drafts: list[int] = field(default_factory=list)  # nodes of each tree, the root not counted
    num_accepted: list[int] = field(default_factory=list)  # output tokens of each step beside one
    draft_seconds: float = 0.0  # time in the drafter, one request at a time

    @property
    def accept_length(self) -> float:
        """Output tokens per verify step."""
        return 1 + sum(self.num_accepted) / max(1, len(self.num_accepted))

    @property
    def accept_histogram(self) -> list[int]:
        """[k]: trees with drafts of which exactly k were accepted; like RequestUsage's."""
        accepted = [count for count, drafts in zip(self.num_accepted, self.num_drafts, strict=True) if drafts]
        return [accepted.count(depth) for depth in range(max(accepted, default=-1) + 1)]

    def add(self, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts.append(num_drafts)
        self.num_accepted.append(num_accepted)


class Replayer:
    """Replays requests with the drafter of one engine. Raises ConfigError for an engine without one."""

    def __init__(self, llm: LLM) -> None:
        executor = llm.engine.executor
        assert isinstance(executor, LocalExecutor)
        self._worker, self._config, capacity = executor.worker, llm.config, executor.capacity
        self._drafts = self._worker.drafts
        if not self._drafts.max_draft_tokens:
            raise ConfigError("plain decoding drafts nothing that could be replayed; name a drafting method")
        device = self._worker.model.embedding.weight.device
        self._capture = self._worker.drafts = _HiddenStateCapture(self._drafts.aux_hidden_state_layers, device)
        max_tokens = capacity.context_length + MAX_TREE_NODES + self._config.page_size
        # Beside the worker's table, which has the whole text: this one has what is known at the present step.
        self._table = RequestTable(1, max_tokens, self._config.page_size, capacity.vocab_size, device)
        self._capacity, self._max_length = capacity, llm.engine.admission.max_length
        self._most_drafts = capacity.max_draft_tokens
        if (most := self._config.speculative.max_step_draft_tokens) is not None:
            self._most_drafts = min(self._most_drafts, most)
        self._num_plans = 0

    @torch.inference_mode()
    def replay(self, logged: LoggedRequest, into: Replayed) -> None:
        """Add the steps in which this drafter would have generated a logged text. See `unusable`."""
        text = logged.prompt_token_ids + logged.output_token_ids
        num_blocks = -(-(len(text) + self._capacity.max_draft_tokens) // self._config.page_size)
        entry = NewRequest(
            SLOT,
            text[: logged.num_prompt_tokens + 1],
            logged.num_prompt_tokens,
            0,
            list(range(1, num_blocks + 1)),  # block 0 is padding
            sampling_options(logged.params, self._capacity.eos_token_ids),
            logged.cache_salt,
            predicted_token_ids=logged.predicted_token_ids,
        )
        hidden_states = self._hidden_states(entry._replace(token_ids=text)) if self._capture.reads_context else None
        self._table.enter(entry)
        self._walk(logged, text, hidden_states, into)
        self._drafts.release([SLOT])
        self._table.free(SLOT)

    def _hidden_states(self, entry: NewRequest) -> Tensor:
        """The target's, [tokens - 1, len(aux_hidden_state_layers) * hidden], of a known text."""
        self._capture.parts.clear()
        left, new = len(entry.token_ids) - 1, [entry]  # the last token stays pending, so nothing is sampled
        while left:
            count = min(left, self._config.chunked_prefill_size)
            self._run(StepPlan(self._num_plans, [], new, [ScheduledRequest(SLOT, count, NO_DRAFTS, [])]))
            left, new = left - count, []
        self._run(StepPlan(self._num_plans, [SLOT], [], []))
        return torch.cat(self._capture.parts)

    def _run(self, plan: StepPlan) -> None:
        self._num_plans += 1
        self._worker.execute(plan)
        self._worker.propose()

    def _walk(self, logged: LoggedRequest, text: list[int], hidden_states: Tensor | None, into: Replayed) -> None:
        """Draft, and accept what the text has. `known` tokens end with the root of the next tree."""
        max_tokens = logged.params.max_tokens
        most = self._max_length if max_tokens is None else logged.num_prompt_tokens + max_tokens
        start, known = 0, logged.num_prompt_tokens + 1
        limit = self._limit(most, known - 1)
        while known < len(text):
            began = time.perf_counter()
            request = DraftRequest(SLOT, start, known - 1, limit)
            gather = None if hidden_states is None else partial(_rows, hidden_states, start, known - 1)
            self._drafts.submit(ProposeContext(self._table, [request], [], gather))
            limit = self._limit(most, known)
            root = text[known - 1]
            rows = TreeRows(self._table.numbers([SLOT]), self._table.numbers([root]), [(SLOT, root)])
            tree, (num_nodes,) = self._drafts.collect(rows, [limit])
            into.draft_seconds += time.perf_counter() - began
            found = tree.to_lists()[0]
            accepted = min(num_accepted(found, text[known:]), len(text) - known - 1)  # one token is the target's own
            into.add(num_nodes - 1, accepted)
            start, known = known - 1, known + accepted + 1
            self._table.extend(SLOT, text[start + 1 : known], [])
            self._table.flush()

    def _limit(self, most: int, num_known: int) -> DraftLimit:
        """A scheduler's limit for the step after `num_known` tokens, of a text of at most `most`."""
        count = max(0, min(self._most_drafts, most - num_known - 1, self._capacity.context_length - num_known))
        return DraftLimit(count, count)


class _HiddenStateCapture(NoDrafts):
    """A DraftSource that keeps the hidden states that a drafter would read."""

    def __init__(self, layers: tuple[int, ...], device: torch.device) -> None:
        super().__init__(1, device)
        self.aux_hidden_state_layers = layers
        self.reads_context = bool(layers)
        self.parts: list[Tensor] = []

    def submit(self, context: ProposeContext) -> None:
        if context.aux_hidden_states is not None:
            self.parts.append(context.aux_hidden_states.clone())


def unusable(logged: LoggedRequest, engine: Engine) -> str | None:
    """Why a request cannot be replayed with an engine's target; None if it can."""
    if logged.is_redacted:
        return "redacted"
    if logged.is_lossy or logged.plain_token_ids is not None:  # by its options, or as an audit found
        return "with a text that depended on the drafts"
    if logged.params.grammar is not None:
        return "with a grammar"
    text = logged.prompt_token_ids + logged.output_token_ids
    if max(text) >= engine.capacity.vocab_size:
        return "of another model"
    return "longer than the KV pool or the context" if len(text) > engine.admission.max_length else None


def _rows(hidden_states: Tensor, start: int, end: int) -> Tensor:
    return hidden_states[start:end]


def num_accepted(tree: TreeLists, text: Sequence[int]) -> int:
    """Length of the longest path below the root that `text` begins with."""
    edges = zip(tree.parents, tree.tokens, strict=True)
    children = {edge: node for node, edge in reversed([*enumerate(edges)])}  # the first of equal siblings counts
    node = ROOT
    for depth, token in enumerate(text):
        if (node := children.get((node, token), ROOT)) == ROOT:
            return depth
    return len(text)
