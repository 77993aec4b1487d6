"""Training-time test: unrolls a head's draft steps over a batch, each on the output states of the previous step.

For a sequence with tokens t and aux hidden states f, step s of the chain that starts at position i reads the embedding
of t[i+1+s] and the state of step s-1 (step 0: from f[i]). It predicts the distribution of t[i+2+s]; its label is the
target's final hidden state at position i+1+s.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specray.train.target import Target


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences, padded at their ends to L."""

    token_ids: Tensor  # int64 [B, L]
    lengths: Tensor  # int64 [B]
    prompt_lengths: Tensor  # int64 [B]
    aux_hidden_states: Tensor  # [B, L, columns]: the head's input
    final: Tensor  # [B, L, H]: hidden states after the target's final norm

    @property
    def start(self) -> int:
        """The first position with a chain in any row. It predicts the first token that the target generated."""
        return max(int(self.prompt_lengths.min()) - 2, 0)


class TrainedModel(nn.Module, ABC):
    """A head or draft model whose parameters have the names of its checkpoint: `state_dict` is what is saved."""

    draft_ids: Tensor  # int64 [draft vocab], ascending: the target's id of each output row
    target_rows: Tensor | None  # the target's output matrix at `draft_ids`, frozen; None: the model has its own

    def __init__(self, draft_ids: Tensor) -> None:
        super().__init__()
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("target_rows", None, persistent=False)

    def take_output_of(self, target: Target) -> None:
        self.target_rows = target.head[self.draft_ids]

    @abstractmethod
    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Yield the states [B, chains, H] after each step; chains start at positions `batch.start` … L-1."""

    @abstractmethod
    def outputs(self, states: Tensor) -> Tensor:
        """The states to multiply with `output_weight`."""

    def extra_loss(self, outputs: Tensor, weight: Tensor, probs: Tensor, label_of: Tensor) -> Tensor:  # noqa: ARG002
        """A loss beside that of the logits `outputs` [n, H] @ `weight` [V, H].T; see `soft_loss` for the labels."""
        return outputs.new_zeros(())

    @property
    def output_weight(self) -> Tensor:
        """[draft vocab, H]"""
        assert self.target_rows is not None
        return self.target_rows


@dataclass(frozen=True, slots=True)
class LabeledPositions:
    """The positions whose final hidden state is a label, numbered row by row."""

    final: Tensor  # [n, H]
    next_ids: Tensor  # int64 [n]: the token after it
    number: Tensor  # int64 [B, L]: a position's index in the above, or -1


@dataclass(frozen=True, slots=True)
class UnrolledStep:
    """The output of one unrolled step for the chains that have a label."""

    outputs: Tensor  # [n, H], to multiply with the head's output weight
    labels: Tensor  # int64 [n], indexes into LabeledPositions
    chains: Tensor  # int64 [n], the chain of each row, numbered equally at every step


def labeled_positions(batch: Batch, usable_ids: Tensor | None = None) -> LabeledPositions:
    """The batch's labels; with `usable_ids` (bool [V]), only those whose next token is one of them."""
    positions = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    next_ids = batch.token_ids.roll(-1, 1)
    has_label = (positions >= batch.prompt_lengths[:, None] - 1) & (positions <= batch.lengths[:, None] - 2)
    if usable_ids is not None:
        has_label &= usable_ids[next_ids]
    number = has_label.flatten().cumsum(0).view_as(has_label) - 1
    return LabeledPositions(batch.final[has_label], next_ids[has_label], number.masked_fill(~has_label, -1))


def unroll(
    head: TrainedModel, target: Target, batch: Batch, labeled: LabeledPositions, steps: int
) -> Iterator[UnrolledStep]:
    """Yield the outputs of each step."""
    device = batch.token_ids.device
    first = torch.arange(batch.start, batch.token_ids.shape[1], device=device)
    chain_of = torch.arange(batch.token_ids.shape[0] * len(first), device=device).view(-1, len(first))
    begins = first >= batch.prompt_lengths[:, None] - 2
    for step, states in enumerate(head.rollout(target, batch, steps)):
        number = shifted(labeled.number, first + 1 + step, fill=-1)
        counts = begins & (number >= 0)
        yield UnrolledStep(head.outputs(states[counts]), number[counts], chain_of[counts])


def shifted(rows: Tensor, positions: Tensor, fill: int = 0) -> Tensor:
    """rows [B, L] at `positions`, `fill` past the end."""
    taken = rows[:, positions.clamp(max=rows.shape[1] - 1)]
    return taken.masked_fill(positions >= rows.shape[1], fill)
