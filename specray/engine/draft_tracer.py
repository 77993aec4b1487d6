"""Builds a request's trace: attributes its text to its tokens, and numbers tokens and steps.

Text reaches the client later than the tokens it belongs to, if it may be part of a stop string or an incomplete
character. `detokenizer` decides what can be sent; a span is recorded once its text is.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specray.draft_trace import DraftTrace, TokenSpan, TracedStep, VerifiedTree
from specray.engine.detokenizer import Cut

# Trees are recorded up to this number of nodes per request: a few megabytes while the client reads slowly.
MAX_TRACED_NODES = 100_000


@dataclass(slots=True)
class _UnsentToken:
    index: int
    depth: int | None
    num_unsent: int  # characters


class DraftTracer:
    """One request's trace. `resumed` is the text of tokens that another engine emitted, which have no depth."""

    def __init__(self, resumed: Cut) -> None:
        self._unsent: deque[_UnsentToken] = deque()
        self._num_tokens = 0
        self._num_nodes = 0
        self._send(resumed, [None] * resumed.num_kept)

    def step(self, tree: VerifiedTree, accepted_nodes: Sequence[int], cut: Cut) -> DraftTrace:
        """The trace of one step that emitted tokens: the accepted nodes of `tree`, then the target's own token."""
        step = TracedStep(self._num_tokens, tree, accepted_nodes)
        spans = self._send(cut, [*range(1, len(accepted_nodes) + 1), 0])
        self._num_nodes += len(tree.token_ids)
        return DraftTrace(spans, [step] if self._num_nodes <= MAX_TRACED_NODES else [])

    def _send(self, cut: Cut, depths: Iterable[int | None]) -> list[TokenSpan]:
        """Add the tokens of `cut`, whose first depths are `depths`, and return the spans of its text."""
        for length, depth in zip(cut.text_lengths, depths, strict=False):  # a stop may cut the last tokens
            self._unsent.append(_UnsentToken(self._num_tokens, depth, length))
            self._num_tokens += 1
        spans, start = [], 0
        while self._unsent:
            token = self._unsent[0]
            text = cut.text[start : start + token.num_unsent]
            start, token.num_unsent = start + len(text), token.num_unsent - len(text)
            is_sent = token.num_unsent == 0 or cut.finish_reason is not None  # the rest was cut off
            if is_sent or text:
                spans.append(TokenSpan(token.index, token.depth, text))
            if not is_sent:
                break
            self._unsent.popleft()
        assert start == len(cut.text), (cut, spans)
        return spans
