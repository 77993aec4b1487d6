"""The grammars of a rank's requests: compiled beside the step, matched along the output, applied to draft trees.

Rank 0 owns them. It defers a request whose grammar is still compiled from the plan, so the other ranks never wait.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specray.errors import InvalidRequestError
from specray.grammar import GRAMMAR_LIMIT_EXCEEDED, NO_TOKEN_ALLOWED, GrammarSpec
from specray.ops.sampling_state import TokenMask
from specray.spec_decode.draft_tree import DraftTree, TreeLists
from specray.step import DraftLimit, RequestResult, ScheduledRequest, StepPlan
from specray.structured_output.compilation import Compilation, GrammarTools

if TYPE_CHECKING:
    from specray.structured_output.compiler import CompiledGrammar, GrammarMatcher

logger = logging.getLogger(__name__)

COMPILER_FAILED = "the grammar's compiler failed; the server's log has the reason"
IDLE_WAIT_S = 0.02  # for a grammar, where a step has nothing else to do
# The CPU time that a request's grammar may take in steps. llguidance's limits count items; their cost grows with the
# square of their number if a grammar is ambiguous.
_MAX_SPENT_S = 0.2
_MAX_SPENT_PER_TOKEN_S = 0.01


@dataclass(slots=True, eq=False)
class SlotGrammar:
    """The grammar of one slot's request."""

    spec: GrammarSpec
    compiled: "Future[CompiledGrammar]"
    output: list[int]  # generated before the request entered: after preemption, or by another engine
    matcher: "GrammarMatcher | None" = None  # state after all tokens of the output; None until it is compiled
    deferred_block_ids: list[int] = field(default_factory=list)
    forced_nodes: Sequence[int] = ()  # nodes of the last tree that the drafter did not propose
    error: str | None = None
    spent_s: float = 0.0  # CPU time in steps

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Work of a step. It ends the request if it takes too long for the tokens that it has made."""
        start = time.thread_time()
        yield
        self.spent_s += time.thread_time() - start
        if self.matcher and self.spent_s > _MAX_SPENT_S + _MAX_SPENT_PER_TOKEN_S * self.matcher.num_tokens:
            self.error = self.error or GRAMMAR_LIMIT_EXCEEDED


class ConstrainedTrees(NamedTuple):
    """Trees that the grammars of their requests allow."""

    tree: DraftTree
    num_nodes: list[int]  # the host's copy of tree.num_nodes
    mask: TokenMask | None  # mask of the sampling rows' logits; None: no request among them has a grammar


class GrammarTable:
    """Grammars by slot, and the thread that compiles them. A step calls it only while `slots` is not empty."""

    def __init__(self, make_tools: Callable[[], GrammarTools]) -> None:
        self.compilation = Compilation(make_tools)
        self.slots: dict[int, SlotGrammar] = {}

    def defer(self, plan: StepPlan) -> tuple[StepPlan, dict[int, RequestResult]]:
        """(the plan without requests whose grammar is not ready, what to report for these, by slot)."""
        for slot in plan.freed_slots:
            self.slots.pop(slot, None)
        for new in plan.new_requests:
            if new.sampling.grammar is not None:
                output = new.token_ids[new.num_prompt_tokens :]
                spec = new.sampling.grammar
                self.slots[new.slot] = SlotGrammar(spec, self.compilation.start(spec), output)
        slots = [row.slot for row in plan.rows]
        compiled = [grammar.compiled for slot in slots if (grammar := self.slots.get(slot)) and not grammar.matcher]
        if compiled and len(compiled) == len(slots):
            wait(compiled, IDLE_WAIT_S, FIRST_COMPLETED)
        deferred = {slot: result for slot in slots if (result := self._unready(slot)) is not None}
        rows = [row for row in map(self._with_blocks, plan.rows) if row.slot not in deferred]
        return plan._replace(rows=rows), deferred

    def constrain(
        self,
        slots: Sequence[int],
        sampling: Sequence[int],
        tree: DraftTree,
        num_nodes: list[int],
        limits: Sequence[DraftLimit],
    ) -> ConstrainedTrees:
        """Cut forbidden drafts, add forced tokens within `limits`, and say what is allowed at every node.

        `slots` [B] are those of the trees; `sampling` are the rows that sample, to whose logits the mask refers.
        """
        rows = [row for row in sampling if self._is_open(slots[row])]
        if not rows:
            return ConstrainedTrees(tree, num_nodes, None)
        trees = tree.to_lists()  # one copy to the host, only in steps with a grammar
        bits: dict[int, Tensor] = {}
        for row in rows:
            grammar = self.slots[slots[row]]
            with grammar.measured():
                trees[row], bits[row] = self._constrain_row(grammar, tree, trees[row], limits[row])
            if not bits[row][0].any():
                assert grammar.matcher is not None
                grammar.error = grammar.matcher.error or NO_TOKEN_ALLOWED
        if tree.draft_probs is None:
            tree = DraftTree.from_lists(trees, tree.tokens.device)
            num_nodes = [len(lists.tokens) for lists in trees]
        return ConstrainedTrees(tree, num_nodes, _mask_of(bits, sampling, num_nodes))

    def error(self, slot: int) -> str | None:
        """Why a request's grammar ends it; None if it does not, or if there is none."""
        return None if (grammar := self.slots.get(slot)) is None else grammar.error

    def forced_nodes(self, slot: int) -> Sequence[int]:
        """Nodes that its grammar added to a request's last tree."""
        return () if (grammar := self.slots.get(slot)) is None else grammar.forced_nodes

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """Advance a request's matcher by its new tokens, up to one that ends the output."""
        grammar = self.slots.get(slot)
        if grammar is None or grammar.matcher is None:
            return
        with grammar.measured():
            for token in token_ids:
                if grammar.matcher.has_ended:
                    return
                if not grammar.matcher.accept(token):
                    mismatch = f"token {token} of the output does not match the request's grammar"
                    grammar.error = grammar.matcher.error or mismatch
                    return

    def _with_blocks(self, row: ScheduledRequest) -> ScheduledRequest:
        """The row with the blocks of the rows that were deferred before it, which the request table has not seen."""
        grammar = self.slots.get(row.slot)
        if grammar is None:
            return row
        blocks = grammar.deferred_block_ids + row.new_block_ids
        grammar.deferred_block_ids = [] if grammar.matcher is not None else blocks
        return row._replace(new_block_ids=blocks)

    def _unready(self, slot: int) -> RequestResult | None:
        """What to report for a slot that cannot run; None if it can. Makes the matcher of a new request."""
        grammar = self.slots.get(slot)
        if grammar is None:
            return None
        if grammar.matcher is None and grammar.error is None:
            if not grammar.compiled.done():
                return RequestResult(slot, [], 0, None, None, is_deferred=True)
            self._start(slot, grammar)
        return None if grammar.error is None else RequestResult(slot, [], 0, None, grammar.error)

    def _start(self, slot: int, grammar: SlotGrammar) -> None:
        error = grammar.compiled.exception()
        if error is not None and not isinstance(error, InvalidRequestError):  # panics of Rust are no Exception
            logger.error("a grammar's compiler failed; its request ends, and others go on", exc_info=error)
            grammar.error = COMPILER_FAILED
            return
        try:
            grammar.matcher = grammar.compiled.result().matcher()
        except InvalidRequestError as error:
            grammar.error = str(error)
            return
        self.accept(slot, grammar.output)

    def _is_open(self, slot: int) -> bool:
        """Whether the request's next token is subject to a grammar. After an end token none is: it is dropped."""
        grammar = self.slots.get(slot)
        return grammar is not None and grammar.matcher is not None and not grammar.matcher.has_ended

    def _constrain_row(
        self, grammar: SlotGrammar, tree: DraftTree, drafts: TreeLists, limit: DraftLimit
    ) -> tuple[TreeLists, Tensor]:
        from specray.structured_output.grammar_tree import added_nodes, allowed_tokens, constrained

        tools = self.compilation.tools
        assert grammar.matcher is not None
        if tree.draft_probs is not None:
            # Rejection sampling: a draft that was drawn must be seen to be rejected, or the residual would be wrong.
            grammar.forced_nodes = ()
            return drafts, allowed_tokens(grammar.matcher, drafts, tools.compiler.num_words)
        allowed, bits = constrained(grammar.matcher, drafts, limit, tools.compiler.num_words, tools.forced)
        grammar.forced_nodes = added_nodes(allowed, drafts)
        return allowed, bits


def _mask_of(bits: dict[int, Tensor], sampling: Sequence[int], num_nodes: list[int]) -> TokenMask:
    """The mask of the logits of rows `sampling`, whose nodes follow each other."""
    places, start = [], 0
    for row in sampling:
        if row in bits:
            places.append(torch.arange(start, start + num_nodes[row]))
        start += num_nodes[row]
    return TokenMask(torch.cat(places), torch.cat([bits[row] for row in sampling if row in bits]))
