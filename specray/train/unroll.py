"""Training-time test: a head's steps unrolled over a batch, each on the states the step before put out.

With tokens t and features f of a sequence, step s of the chain that starts at position i reads the embedding of
t[i+1+s] and the state of step s-1 (step 0: from f[i]) and predicts the law of t[i+2+s], which the target's final state
at position i+1+s teaches. Not here: reading batches (`batches`), the loss (`loss`), what is measured (`validation`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specray.train.attention import ChainMemory
from specray.train.target import Target


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences, padded at their ends to L."""

    token_ids: Tensor  # int64 [B, L]
    lengths: Tensor  # int64 [B]
    prompt_lengths: Tensor  # int64 [B]
    aux_hidden_states: Tensor  # [B, L, columns]: what the head reads
    final: Tensor  # [B, L, H]: hidden states after the target's final norm

    @property
    def start(self) -> int:
        """The first position with a chain in any row: it predicts a token the target wrote itself."""
        return max(int(self.prompt_lengths.min()) - 2, 0)


class DraftHead(Protocol):
    """What the trainer asks of whatever drafts."""

    draft_ids: Tensor  # int64 [draft vocab], ascending: the target's ids of the output rows

    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        """The states [B, chains, H] after each step in turn; chains start at positions `batch.start` … L-1."""

    def outputs(self, states: Tensor) -> Tensor:
        """What is multiplied with `output_weight`."""

    @property
    def output_weight(self) -> Tensor:
        """[draft vocab, H]"""


class HiddenStateHead(Protocol):
    """A head that reads the target's features; states are [B, L, H]."""

    def enter(self, aux_hidden_states: Tensor) -> Tensor:
        """The first state, from target features [B, L, columns it was built for]."""

    def step(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, memory: ChainMemory) -> Tensor:
        """One draft step; at step 0 over all L positions, and only those with chains come back."""


@dataclass(frozen=True, slots=True)
class Lessons:
    """The positions whose final states teach, numbered row by row."""

    final: Tensor  # [n, H]
    next_ids: Tensor  # int64 [n]: the token that followed
    number: Tensor  # int64 [B, L]: a position's index in the above, or -1


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One unrolled step, of the chains that have something to learn from."""

    outputs: Tensor  # [n, H], to be multiplied with the head's output weight
    lessons: Tensor  # int64 [n], indexes into Lessons
    chains: Tensor  # int64 [n], which chain of the batch each row is; the same number at every step


def lessons(batch: Batch, usable_ids: Tensor | None = None) -> Lessons:
    """What the target teaches in this batch; only where the next token is one of `usable_ids` (bool [V]), if given."""
    positions = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    next_ids = batch.token_ids.roll(-1, 1)
    taught = (positions >= batch.prompt_lengths[:, None] - 1) & (positions <= batch.lengths[:, None] - 2)
    if usable_ids is not None:
        taught &= usable_ids[next_ids]
    number = taught.flatten().cumsum(0).view_as(taught) - 1
    return Lessons(batch.final[taught], next_ids[taught], number.masked_fill(~taught, -1))


def unroll(head: DraftHead, target: Target, batch: Batch, taught: Lessons, steps: int) -> Iterator[StepOutput]:
    """The outputs of each step in turn."""
    device = batch.token_ids.device
    first = torch.arange(batch.start, batch.token_ids.shape[1], device=device)
    chain_of = torch.arange(batch.token_ids.shape[0] * len(first), device=device).view(-1, len(first))
    begins = first >= batch.prompt_lengths[:, None] - 2
    for step, states in enumerate(head.rollout(target, batch, steps)):
        number = _shifted(taught.number, first + 1 + step, fill=-1)
        counts = begins & (number >= 0)
        yield StepOutput(head.outputs(states[counts]), number[counts], chain_of[counts])


def hidden_state_rollout(head: HiddenStateHead, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
    """`DraftHead.rollout` of a head that reads features."""
    start, length = batch.start, batch.token_ids.shape[1]
    memory = ChainMemory(start)
    states = head.enter(batch.aux_hidden_states)
    for step in range(steps):
        positions = torch.arange(start if step else 0, length, device=batch.token_ids.device) + step
        embeds = target.embed(_shifted(batch.token_ids, positions + 1))
        states = head.step(embeds, states, *target.rotary.at(positions), memory)
        yield states


def _shifted(rows: Tensor, positions: Tensor, fill: int = 0) -> Tensor:
    """rows [B, L] at `positions`, `fill` past the end."""
    taken = rows[:, positions.clamp(max=rows.shape[1] - 1)]
    return taken.masked_fill(positions >= rows.shape[1], fill)
