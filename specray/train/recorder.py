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
    features: Tensor  # [n, feature width]; the last token was sampled, not computed: zeros


class FeatureRecorder:
    """Drafter; hands every ended request to `take`. Needs the prefix cache off: features of a hit are not computed."""

    max_draft_tokens = 0
    reads_next_token = False

    def __init__(self, feature_layers: Sequence[int], take: Callable[[Recording], None]) -> None:
        self.feature_layers = tuple(feature_layers)
        self._take = take
        self._rows: dict[int, DraftRow] = {}
        self._features: dict[int, list[Tensor]] = {}

    def propose(self, context: ProposeContext) -> DraftTree:
        rows = context.rows + context.unfinished
        if rows:
            assert context.features is not None
            features = context.features.to("cpu", torch.bfloat16)
            parts = torch.split(features, [row.end - row.start for row in rows])
            for row, part in zip(rows, parts, strict=True):
                self._rows[row.slot] = row
                self._features.setdefault(row.slot, []).append(part)
        return DraftTree.of([RowTree(row.token_ids[-1:], [NONE]) for row in context.rows])

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if row := self._rows.pop(slot, None):
                features = torch.cat(self._features.pop(slot))
                assert len(features) == len(row.token_ids) - 1, (len(features), len(row.token_ids))
                padded = torch.cat((features, features.new_zeros(1, features.shape[1])))
                self._take(Recording(row.seed, list(row.token_ids), padded))
