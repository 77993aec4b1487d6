"""The drafter of a request, where there are several."""

from dataclasses import dataclass

from specray.engine.drafter_selection.text_kind import TextKind


@dataclass(slots=True, eq=False)
class DrafterChoice:
    """Which of several drafters a request has, and what it generated since this was last counted."""

    name: str
    shadow: str  # the drafter that is measured beside it; empty: none
    kind: TextKind
    max_draft_tokens: int  # of a tree of the drafter or its shadow, where it is configured
    tokens: int = 0
    time: float = 0.0  # in units of what a token usually takes
