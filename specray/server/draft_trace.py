"""The field `trace` of a streamed choice: how its tokens came about. A request asks for it by `speculative.trace`.

`tokens` are the chunk's text by token: `depth` is the depth at which a draft was accepted, 0 for the target's own
token, and null for a token of another engine, before a failover. `steps` are the trees that were verified: the texts of
their nodes, the nodes' parents, and the accepted nodes. Node 0 is the token before the step; `index` is the step's
first token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specray.draft_trace import DraftTrace, TracedStep
from specray.engine.engine_request import EngineRequest
from specray.errors import InvalidRequestError
from specray.server.tokenization import TokenTexts

MAX_NODE_TEXT = 24  # characters of a node's text; a vocabulary has tokens of a hundred spaces

Json = dict[str, Any]


def traced(requests: Sequence[EngineRequest], has_place: bool) -> EngineRequest:
    """The single request, with a trace. InvalidRequestError if there are several, or the reply cannot hold one."""
    if len(requests) > 1 or not has_place:
        raise InvalidRequestError(
            "speculative.trace=true: a trace is part of a stream of one choice of chat or text completions; set "
            "stream=true and n=1 there, or leave trace out",
            "speculative.trace",
        )
    return replace(requests[0], traces_drafts=True)


def trace_fields(trace: DraftTrace, token_texts: TokenTexts) -> Json:
    """The field to add to a choice."""
    tokens = [{"index": span.token_index, "depth": span.depth, "text": span.text} for span in trace.spans]
    return {"trace": {"tokens": tokens, "steps": [_step(step, token_texts) for step in trace.steps]}}


def _step(step: TracedStep, token_texts: TokenTexts) -> Json:
    texts = [token_texts(token_id).text[:MAX_NODE_TEXT] for token_id in step.tree.token_ids]
    return {"index": step.token_index, "tokens": texts, "parents": step.tree.parents, "accepted": step.accepted_nodes}
