"""Initialization of heads from a few of the target's answers. It takes seconds and shortens the beginning of a run.

Linear: a head's input matrix is a least-squares fit to the target's next hidden state. Mask: that of a P-EAGLE head
attends to the last token that is known. An MTP layer can start from an EAGLE-2 head.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from specray.models.weights import WeightReader
from specray.train.batches import AnswerFolder, Collate
from specray.train.export import load_exported
from specray.train.heads import TrainedEagle2Head, TrainedEagle3Head, TrainedHead, TrainedMtpHead, TrainedParallelHead
from specray.train.shards import Answer
from specray.train.target import Target
from specray.train.trained_parts import TrainedAttention, rotated
from specray.train.unroll import Batch, shifted

_LINEAR_ANSWERS, _MASK_ANSWERS, _MTP_ANSWERS = 100, 8, 40
_RIDGE = 0.03  # added to the inputs' mean squares, which are 1
_MASK_ITERATIONS = 120
_MASK_RATE = 0.1


@torch.no_grad()
def start_linear(head: TrainedHead, target: Target, folder: AnswerFolder, collate: Collate) -> None:
    """Set fc to the best linear prediction of the target's final hidden state one position ahead."""
    pairs = [_pairs(head, target, collate([answer])) for answer in islice(_training_answers(folder), _LINEAR_ANSWERS)]
    inputs, wanted = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    weight = _ridge(inputs, wanted)
    head.fc.weight.copy_(weight)
    if isinstance(head, TrainedEagle3Head):
        # The norm before the output matrix removes the prediction's scale; its weight restores it.
        head.network.norm.weight.fill_(float((inputs @ weight.T).square().mean().sqrt()))


def fit_mask(head: TrainedParallelHead, target: Target, folder: AnswerFolder, collate: Collate, num_masks: int) -> None:
    """Fit `mask_hidden` so that the first layer's attention from each of `num_masks` masks goes to the last position.

    Maximizes the mean logarithm of its weight. All else of the head stays as it is. With a random mask, attention is
    spread over all positions, and its predictions hardly depend on the text. In a short run it stays so for most of the
    steps.
    """
    answers = list(islice(_training_answers(folder), _MASK_ANSWERS))
    with torch.no_grad():
        keys = [_keys(head, target, collate([answer])) for answer in answers]
    optimizer = torch.optim.Adam([head.mask_hidden], lr=_MASK_RATE)
    for iteration in range(_MASK_ITERATIONS if keys and num_masks else 0):
        mask = 1 + iteration % num_masks
        loss = -_log_weights(head, target, keys[iteration % len(keys)], mask).mean()
        optimizer.zero_grad()
        [head.mask_hidden.grad] = torch.autograd.grad(loss, [head.mask_hidden])
        optimizer.step()
    head.mask_hidden.grad = None


def is_eagle2(folder: Path) -> bool:
    """Whether the weights in a folder are those of an EAGLE-2 head."""
    with WeightReader(folder, "safetensors") as reader:
        return "fc.weight" in reader.names() and "d2t" not in reader.names()


@torch.no_grad()
def start_from_eagle2(
    head: TrainedMtpHead, source: Path, target: Target, answers: AnswerFolder, collate: Collate
) -> None:
    """Copy the matrices of the head in `source`, and measure the sizes of hidden states on a few answers.

    Both read the target's final hidden state and the next token, but an MTP layer norms its inputs, what its attention
    reads and its output. With the usual sizes of these as the norms' weights, it computes nearly what the head does.
    """
    eagle2 = TrainedEagle2Head(head.shape, head.draft_ids.cpu(), target)
    load_exported(eagle2, source)
    eagle2.to(target.device)
    batches = [collate([answer]) for answer in islice(_training_answers(answers), _MTP_ANSWERS)]
    states = torch.cat([batch.aux_hidden_states[0, :-1].float() for batch in batches])
    embeds = torch.cat([target.embed(batch.token_ids[0, 1:]).float() for batch in batches])
    of_embeds, of_states = eagle2.fc.weight.chunk(2, 1)
    layer, size_of_states = head.network, _size(states)
    head.fc.weight.copy_(torch.cat((of_states, of_embeds), 1))
    layer.embed_norm.weight.fill_(_size(embeds))
    layer.state_norm.weight.fill_(size_of_states)
    layer.out_norm.weight.fill_(size_of_states)  # the head predicts the next one
    decoder, source_decoder = (trained.decoder_prefix for trained in (head, eagle2))
    tensors = head.state_dict()
    tensors[f"{decoder}input_layernorm.weight"].fill_(_size(eagle2.fc(torch.cat((embeds, states), -1))))
    for name, tensor in eagle2.state_dict().items():  # it has no biases
        if name.startswith(source_decoder):
            tensors[decoder + name.removeprefix(source_decoder)].copy_(tensor)


def _pairs(head: TrainedHead, target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    """The input of fc at each position of an answer, and the final hidden state one position ahead."""
    aux_hidden_states = batch.aux_hidden_states[0, :-2].float()
    embeds, wanted = target.embed(batch.token_ids[0, 1:-1]).float(), batch.final[0, 1:-1].float()
    if isinstance(head, TrainedEagle3Head):
        return head.network.normed(aux_hidden_states), wanted
    if isinstance(head, TrainedMtpHead):  # its final norm, initialized as the target's, follows the prediction
        positions = torch.arange(len(embeds), device=embeds.device)
        return head.network.joined(embeds, aux_hidden_states, positions), wanted / target.norm.float()
    return torch.cat((embeds, aux_hidden_states), -1), wanted


def _training_answers(folder: AnswerFolder) -> Iterator[Answer]:
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


def _keys(head: TrainedParallelHead, target: Target, batch: Batch) -> Tensor:
    """The first layer's keys of an answer's positions but the last, [kv_heads, L - 1, dim]."""
    positions = torch.arange(batch.token_ids.shape[1] - 1, device=batch.token_ids.device)
    embeds = target.embed(shifted(batch.token_ids, positions + 1)).float()
    inputs, _ = head.network.joined(embeds, head.enter(batch.aux_hidden_states[:, :-1].float()))
    attention = _first_attention(head)
    keys = attention.k_proj(inputs)[0].unflatten(-1, (-1, attention.head_dim))
    return rotated(keys, *target.rotary.at(positions)).transpose(0, 1)


def _log_weights(head: TrainedParallelHead, target: Target, keys: Tensor, mask: int) -> Tensor:
    """Of each position as the last known one, for the mask of this number behind it, [kv_heads, group, positions]."""
    attention, device = _first_attention(head), keys.device
    embeds = target.embed(torch.tensor([[head.mask_token_id]], device=device)).float()
    inputs, _ = head.network.joined(embeds, head.enter(head.mask_hidden[None]))
    query, key = (proj(inputs).view(-1, attention.head_dim) for proj in (attention.q_proj, attention.k_proj))
    last = torch.arange(keys.shape[1], device=device)
    queries = _at(target, query * attention.head_dim**-0.5, last + mask)
    queries = queries.view(len(key), -1, *queries.shape[1:])
    scores = (queries @ keys.transpose(1, 2)[:, None]).masked_fill(last > last[:, None], float("-inf"))
    of_masks = [(queries * _at(target, key, last + number)[:, None]).sum(-1) for number in range(1, mask + 1)]
    weights = torch.cat((scores, torch.stack(of_masks, -1)), -1).log_softmax(-1)
    return weights.diagonal(dim1=-2, dim2=-1)


def _first_attention(head: TrainedParallelHead) -> TrainedAttention:
    attention = head.get_submodule(head.decoder_prefix + "self_attn")
    assert isinstance(attention, TrainedAttention)
    return attention


def _at(target: Target, rows: Tensor, positions: Tensor) -> Tensor:
    """rows [heads, dim] rotated to each position, [heads, positions, dim]."""
    return rotated(rows.expand(len(positions), -1, -1), *target.rotary.at(positions)).transpose(0, 1).contiguous()


def _size(rows: Tensor) -> float:
    """The mean of the rows' root mean squares."""
    return float(rows.square().mean(-1).sqrt().mean())
