"""Initialization of a P-EAGLE head's mask: masks attend to the last token that is known.

With a random mask, attention is spread over all positions, and its predictions hardly depend on the text. In a short
run it stays so for most of the steps. The fit takes seconds.
"""

from itertools import islice

import torch
from torch import Tensor

from specray.train.batches import AnswerFolder, Collate
from specray.train.heads import Eagle3Layer, TrainedParallelHead, rotated
from specray.train.start import training_answers
from specray.train.target import Target
from specray.train.unroll import Batch, shifted

_ANSWERS = 8
_ITERATIONS = 120
_RATE = 0.1


def fit_mask(head: TrainedParallelHead, target: Target, folder: AnswerFolder, collate: Collate, num_masks: int) -> None:
    """Fit `mask_hidden` so that the first layer's attention from each of `num_masks` masks goes to the last position.

    Maximizes the mean logarithm of its weight. All else of the head stays as it is.
    """
    layer = head.midlayer if head.shape.num_layers == 1 else head.layers[0]
    assert isinstance(layer, Eagle3Layer)
    answers = list(islice(training_answers(folder), _ANSWERS))
    with torch.no_grad():
        keys = [_keys(head, layer, target, collate([answer])) for answer in answers]
    optimizer = torch.optim.Adam([head.mask_hidden], lr=_RATE)
    for iteration in range(_ITERATIONS if keys and num_masks else 0):
        mask = 1 + iteration % num_masks
        loss = -_log_weights(head, layer, target, keys[iteration % len(keys)], mask).mean()
        optimizer.zero_grad()
        [head.mask_hidden.grad] = torch.autograd.grad(loss, [head.mask_hidden])
        optimizer.step()
    head.mask_hidden.grad = None


def _keys(head: TrainedParallelHead, layer: Eagle3Layer, target: Target, batch: Batch) -> Tensor:
    """Those of an answer's positions but the last, [kv_heads, L - 1, dim]."""
    positions = torch.arange(batch.token_ids.shape[1] - 1, device=batch.token_ids.device)
    states = head.enter(batch.aux_hidden_states[:, :-1].float())
    inputs = _inputs(layer, target.embed(shifted(batch.token_ids, positions + 1)).float(), states)
    keys = layer.self_attn.k_proj(inputs)[0].unflatten(-1, (-1, layer.self_attn.head_dim))
    return rotated(keys, *target.rotary.at(positions)).transpose(0, 1)


def _log_weights(head: TrainedParallelHead, layer: Eagle3Layer, target: Target, keys: Tensor, mask: int) -> Tensor:
    """Of each position as the last known one, for the mask of this number behind it, [kv_heads, group, positions]."""
    attention, device = layer.self_attn, keys.device
    embeds = target.embed(torch.tensor([[head.mask_token_id]], device=device)).float()
    inputs = _inputs(layer, embeds, head.enter(head.mask_hidden[None]))
    query, own = (proj(inputs).view(-1, attention.head_dim) for proj in (attention.q_proj, attention.k_proj))
    last = torch.arange(keys.shape[1], device=device)
    queries = _at(target, query * attention.head_dim**-0.5, last + mask)
    queries = queries.view(len(own), -1, *queries.shape[1:])
    scores = (queries @ keys.transpose(1, 2)[:, None]).masked_fill(last > last[:, None], float("-inf"))
    of_masks = [(queries * _at(target, own, last + number)[:, None]).sum(-1) for number in range(1, mask + 1)]
    weights = torch.cat((scores, torch.stack(of_masks, -1)), -1).log_softmax(-1)
    return weights.diagonal(dim1=-2, dim2=-1)


def _inputs(layer: Eagle3Layer, embeds: Tensor, states: Tensor) -> Tensor:
    return torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(states)), -1)


def _at(target: Target, rows: Tensor, positions: Tensor) -> Tensor:
    """rows [heads, dim] rotated to each position, [heads, positions, dim]."""
    return rotated(rows.expand(len(positions), -1, -1), *target.rotary.at(positions)).transpose(0, 1).contiguous()
