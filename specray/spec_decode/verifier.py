"""The one verifier: walk each tree from its root, taking at every node the token that is chosen there.

While that token is a child of the node the walk descends; the first that is not is the bonus token. By the ordinary
choice, `coupled`, the target samples it, so the output is the target's own text, whatever was drafted. Each depth is
one batched choice, and penalties see the path's own tokens because they are emitted first.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.sampling import SamplerRow, token_logprob
from specray.outputs import TokenLogprob
from specray.spec_decode.choice import NodeSampler, children_of, coupled
from specray.spec_decode.draft_tree import ROOT, DraftTree


class VerifyOutput(NamedTuple):
    """One row's outcome."""

    path: list[int]  # accepted nodes, the root first; their KV stays
    token_ids: list[int]  # accepted drafts, then the bonus token: as many as `path`
    logprobs: list[TokenLogprob] | None
    is_broken: bool  # the logits were not numbers; nothing else may be used


def verify(
    logits: Tensor, tree: DraftTree, rows: Sequence[SamplerRow], lengths: Sequence[int], choose: NodeSampler = coupled
) -> list[VerifyOutput]:
    """Judge every row's tree.

    `logits` is float32 [sum of num_nodes, V], rows and nodes in order; `lengths[i]` is row i's number of
    known tokens, root included, and so the position of the first token to sample. Counts emitted tokens
    in `rows`.
    """
    walks = [_Walk(row, lengths[i]) for i, row in enumerate(rows)]
    children = children_of(tree)
    first = [sum(tree.num_nodes[:i]) for i in range(len(rows))]
    active, depth = list(range(len(rows))), 0
    while active:
        nodes = [walks[i].path[-1] for i in active]
        here = logits[torch.tensor([first[i] + node for i, node in zip(active, nodes, strict=True)]).to(logits.device)]
        below = [children[i].get(node, {}) for i, node in zip(active, nodes, strict=True)]
        probs_list = None if tree.draft_probs is None else tree.draft_probs[active, nodes]
        tokens = choose(here, [rows[i] for i in active], [walks[i].position for i in active], below, probs_list, depth)
        chosen = here.gather(1, tokens[:, None]).isfinite()[:, 0]
        # To the host once per depth: a handful of tokens, and the walk is data dependent.
        for i, row_logits, token, is_sound in zip(active, here, tokens.tolist(), chosen.tolist(), strict=True):
            walks[i].emit(token, row_logits, is_sound)
        active = [i for i, drafts in zip(active, below, strict=True) if walks[i].descend(drafts)]
        depth += 1
    return [walk.output() for walk in walks]


class _Walk:
    """One row on its way down its tree."""

    def __init__(self, row: SamplerRow, length: int) -> None:
        self.position = length
        self.path = [ROOT]
        self._row = row
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if row.options.logprobs is None else []
        self._is_broken = False

    def emit(self, token: int, logits: Tensor, is_sound: bool) -> None:
        if not is_sound:
            self._is_broken = True
            return
        self._row.emitted(token)
        self._tokens.append(token)
        if self._logprobs is not None:
            self._logprobs.append(token_logprob(logits, token, self._row.options.logprobs or 0))

    def descend(self, children: Mapping[int, int]) -> bool:
        """Go to the child with the token just emitted; False if there is none."""
        if self._is_broken or (child := children.get(self._tokens[-1])) is None:
            return False
        self.path.append(child)
        self.position += 1
        return True

    def output(self) -> VerifyOutput:
        return VerifyOutput(self.path, self._tokens, self._logprobs, self._is_broken)
