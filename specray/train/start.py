"""Linear initialization: a head's input matrix as a least-squares fit to the target's next hidden state.

It takes seconds and shortens the beginning of a run.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from specray.train.batches import AnswerFolder, Collate
from specray.train.heads import TrainedEagle2Head, TrainedEagle3Head, TrainedHead, TrainedMtpHead
from specray.train.shards import Answer
from specray.train.target import Target
from specray.train.unroll import Batch

_ANSWERS = 100
_RIDGE = 0.03  # added to the inputs' mean squares, which are 1


@torch.no_grad()
def start_linear(head: TrainedHead, target: Target, folder: AnswerFolder, collate: Collate) -> None:
    """Set fc to the best linear prediction of the target's final hidden state one position ahead."""
    pairs = [_pairs(head, target, collate([answer])) for answer in islice(training_answers(folder), _ANSWERS)]
    inputs, wanted = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    weight = _ridge(inputs, wanted)
    head.fc.weight.copy_(weight)
    if isinstance(head, TrainedEagle3Head):
        # The norm before the output matrix removes the prediction's scale; its weight restores it.
        head.norm.weight.fill_(float((inputs @ weight.T).square().mean().sqrt()))


def _pairs(head: TrainedHead, target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    """The input of fc at each position of an answer, and the final hidden state one position ahead."""
    aux_hidden_states = batch.aux_hidden_states[0, :-2].float()
    embeds, wanted = target.embed(batch.token_ids[0, 1:-1]).float(), batch.final[0, 1:-1].float()
    if isinstance(head, TrainedEagle2Head):
        return torch.cat((embeds, aux_hidden_states), -1), wanted
    if isinstance(head, TrainedMtpHead):  # its final norm, initialized as the target's, follows the prediction
        return head.joined(embeds[None], aux_hidden_states[None], masks_first=True)[0], wanted / target.norm.float()
    return head.normed_hidden_states(aux_hidden_states), wanted


def training_answers(folder: AnswerFolder) -> Iterator[Answer]:
    """Those that are not held out, without the shortest."""
    for name in folder.names():
        shard = folder[name]
        yield from (shard[i] for i in range(len(shard)) if shard.lengths[i] > 2 and not shard.is_held_out(i))


def _ridge(inputs: Tensor, wanted: Tensor) -> Tensor:
    """[columns of wanted, columns of inputs]"""
    scale = inputs.square().mean(0).sqrt().clamp(min=1e-6)
    inputs = inputs / scale
    gram = inputs.T @ inputs / len(inputs) + _RIDGE * torch.eye(inputs.shape[1], device=inputs.device)
    solved: Tensor = torch.linalg.solve(gram, inputs.T @ wanted / len(inputs))
    return solved.T / scale
