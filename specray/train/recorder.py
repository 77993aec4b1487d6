"""A drafter that drafts nothing and writes down what the target computed: token ids and features of every request.

So the training data comes out of the very run that generates the answers, through the door every drafter uses.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.spec_decode.draft_tree import NONE, DraftTree, RowTree
from specray.spec_decode.drafter import DraftRow, ProposeContext


class Recording(NamedTuple):
    """One request from its first to its last token."""

    seed: int  # the request's, by which the caller knows it
    token_ids: list[int]  # prompt and answer, n tokens
    aux_hidden_states: Tensor  # [n, feature width]; the last token was sampled, not computed: zeros


class HiddenStateRecorder:
    """Drafter; hands every ended request to `take`. Needs the prefix cache off: features of a hit are not computed."""

    max_draft_tokens = 0
    reads_next_token = False

    def __init__(self, aux_hidden_state_layers: Sequence[int], take: Callable[[Recording], None]) -> None:
        self.aux_hidden_state_layers = tuple(aux_hidden_state_layers)
        self._take = take
        self._rows: dict[int, DraftRow] = {}
        self._aux_hidden_states: dict[int, list[Tensor]] = {}

    def propose(self, context: ProposeContext) -> DraftTree:
        rows = context.rows + context.unfinished
        if rows:
            assert context.aux_hidden_states is not None
            aux_hidden_states = context.aux_hidden_states.to("cpu", torch.bfloat16)
            parts = torch.split(aux_hidden_states, [row.end - row.start for row in rows])
            for row, part in zip(rows, parts, strict=True):
                self._rows[row.slot] = row
                self._aux_hidden_states.setdefault(row.slot, []).append(part)
        return DraftTree.of([RowTree(row.token_ids[-1:], [NONE]) for row in context.rows])

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if row := self._rows.pop(slot, None):
                aux_hidden_states = torch.cat(self._aux_hidden_states.pop(slot))
                assert len(aux_hidden_states) == len(row.token_ids) - 1, (len(aux_hidden_states), len(row.token_ids))
                padded = torch.cat((aux_hidden_states, aux_hidden_states.new_zeros(1, aux_hidden_states.shape[1])))
                self._take(Recording(row.seed, list(row.token_ids), padded))
