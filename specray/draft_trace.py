"""The trace of a request: the draft trees that were verified, and which tokens had been drafted.

A request asks for its trace (`EngineRequest.traces_drafts`). Nothing is recorded for the others.
"""

from collections.abc import Sequence
from typing import NamedTuple


class VerifiedTree(NamedTuple):
    """One request's draft tree in a step. Node 0 is the last token known before the step."""

    token_ids: list[int]
    parents: list[int]  # parents[0] == -1, parents[i] < i


class TokenSpan(NamedTuple):
    """A token's text. A token of which only a part may be sent yet (see TextStream) has several spans."""

    token_index: int  # place in the output
    depth: int | None  # depth of the accepted node; 0: the target's own token; None: another engine generated it
    text: str


class TracedStep(NamedTuple):
    """A step that emitted tokens."""

    token_index: int  # place of its first token in the output
    tree: VerifiedTree
    accepted_nodes: Sequence[int]  # nodes from depth 1 on; empty: only the target's own token was emitted


class DraftTrace(NamedTuple):
    """The part of a trace that belongs to one output. The spans' texts concatenate to the output's text."""

    spans: list[TokenSpan]
    steps: list[TracedStep]


def merge_traces(first: DraftTrace | None, second: DraftTrace | None) -> DraftTrace | None:
    """The traces of two consecutive outputs as one."""
    if first is None or second is None:
        return first or second
    return DraftTrace(first.spans + second.spans, first.steps + second.steps)
