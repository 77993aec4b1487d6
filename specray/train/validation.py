"""Validates a head on held-out sequences: its agreement with the target's top-1 token of the whole vocabulary.

Depth s is the s-th unrolled step (0: from the target's hidden states). A chain is "accepted" at a depth if that and
all smaller depths agree, so 1 + the sum over depths is the accept length of a drafted chain at temperature 0.
"""

from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from specray.train.batches import AnswerFolder, Collate, Place
from specray.train.target import Target
from specray.train.unroll import Batch, LabeledPositions, TrainedModel, labeled_positions, unroll

DEPTHS = 5
_TOP = (4, 8)
_MAX_SEQUENCES = 100
_CHUNK = 256
_ABSENT = 1 << 40  # the rank of a token outside the draft vocabulary


@dataclass(frozen=True, slots=True)
class Validation:
    """Metrics of one pass; lists have one value per depth."""

    num_sequences: int
    num_positions: int
    top1: list[float]  # agrees, regardless of smaller depths
    conditional: list[float]  # agrees, given that all smaller depths did
    accepted: list[float]  # this and all smaller depths agree
    accept_length: float  # a chain's: 1 + sum of `accepted`
    top4: list[float]  # the target's token is among the top 4
    top8: list[float]
    accept_length_top4: float  # 1 + sum of the share of chains with it among the top 4 at every depth so far
    accept_length_top8: float
    covered: float  # the target's token is in the draft vocabulary

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Validator:
    """Up to 100 held-out sequences of a folder, and the target's top-1 tokens on them."""

    def __init__(self, folder: AnswerFolder, target: Target, collate: Collate) -> None:
        self._folder = folder
        self._target = target
        self._collate = collate
        self._top1: dict[Place, Tensor] = {}

    @torch.no_grad()
    def __call__(self, head: TrainedModel, depths: int = DEPTHS) -> Validation | None:
        """The metrics, or None if no sequence is held out yet."""
        hits = [
            self._hits((name, row), self._collate([self._folder[name][row]]), head, depths)
            for name, row in self._held_out()
        ]
        # All depths are measured on the same chains: those with all depths before their sequence ends.
        rows = [part[(part >= 0).all(1)] for part in hits]
        return _figures(torch.cat(rows), len(rows)) if any(len(part) for part in rows) else None

    def _held_out(self) -> list[Place]:
        """The folder may grow, and its new shards may come first."""
        found = (self._folder.usable(name, self._collate.max_length, held_out=True) for name in self._folder.names())
        return list(islice(chain.from_iterable(found), _MAX_SEQUENCES))

    def _hits(self, place: Place, batch: Batch, head: TrainedModel, depths: int) -> Tensor:
        """int64 [chains, depths]: rank of the target's token among the draft's; -1 past the end of the sequence."""
        labeled = labeled_positions(batch)
        if place not in self._top1:
            self._top1[place] = _top1_tokens(labeled, self._target.head)
        top1 = self._top1[place]
        chains = batch.token_ids.shape[1] - batch.start
        ranks = torch.full((chains, depths), -1, device=top1.device)
        output_weight = head.output_weight.to(batch.aux_hidden_states.dtype)
        column_of = torch.full((self._target.head.shape[0],), -1, device=top1.device)
        column_of[head.draft_ids] = torch.arange(len(head.draft_ids), device=top1.device)
        for depth, step in enumerate(unroll(head, self._target, batch, labeled, depths)):
            logits = (step.outputs @ output_weight.T).float()
            column = column_of[top1[step.labels]]
            wanted = logits.gather(1, column.clamp(min=0)[:, None])
            better = (logits > wanted).sum(-1)
            ranks[step.chains, depth] = better.masked_fill(column < 0, _ABSENT)
        return ranks


def _top1_tokens(labeled: LabeledPositions, target_head: Tensor) -> Tensor:
    """The target's top-1 token of the whole vocabulary at every labeled position, int64 [n]."""
    parts = [(rows @ target_head.T).argmax(-1) for rows in torch.split(labeled.final, _CHUNK)]
    return torch.cat(parts)


def _figures(rows: Tensor, num_sequences: int) -> Validation:
    top1, agreed = _shares(rows, 1)
    tops = [_shares(rows, count) for count in _TOP]
    conditional = [now / before if before else 0.0 for now, before in zip(agreed, [1.0, *agreed], strict=False)]
    return Validation(
        num_sequences=num_sequences,
        num_positions=len(rows),
        top1=top1,
        conditional=[round(share, 4) for share in conditional],
        accepted=agreed,
        accept_length=round(1 + sum(agreed), 4),
        top4=tops[0][0],
        top8=tops[1][0],
        accept_length_top4=round(1 + sum(tops[0][1]), 4),
        accept_length_top8=round(1 + sum(tops[1][1]), 4),
        covered=round(1 - float((rows[:, 0] == _ABSENT).float().mean()), 4),
    )


def _shares(ranks: Tensor, count: int) -> tuple[list[float], list[float]]:
    """By depth: the share of rows with a rank below `count`, and with one at this and all smaller depths."""
    hits = (ranks < count).float()
    every = hits.cumprod(1)
    return [round(share, 4) for share in hits.mean(0).tolist()], [round(share, 4) for share in every.mean(0).tolist()]
