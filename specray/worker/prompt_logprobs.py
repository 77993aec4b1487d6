"""Log probabilities of prompt tokens, from the hidden states that a step computes anyway.

The logits of a chunk's positions are computed in slices of bounded memory, so that a long prompt over a large
vocabulary needs no more than a short one.
"""

from itertools import accumulate

import torch
from torch import Tensor

from specray.models.target_model import TargetModel
from specray.outputs import TokenLogprob
from specray.worker.input_batch import StepBatch

SLICE_LOGITS = 2**23  # logits of a slice: 32 MiB in float32


def compute_prompt_logprobs(model: TargetModel, batch: StepBatch, hidden: Tensor) -> dict[int, list[TokenLogprob]]:
    """By row, those of the prompt tokens that follow the positions computed in this step.

    `hidden` [T, hidden] are the final states. Call it on all ranks, before the step is committed.
    """
    wanted = [(row, state.prompt_logprobs) for row, state in enumerate(batch.rows.states) if state.prompt_logprobs]
    found, root_places = {}, _root_places(batch)
    for row, (start, num_top) in wanted:
        state = batch.rows.states[row]
        end = state.num_computed_tokens + batch.rows.num_known[row]
        first, last = max(state.num_computed_tokens, start), min(end, state.num_prompt_tokens - 1)
        if first < last:
            place = root_places[row] - (end - 1 - first)
            tokens = state.token_ids[first + 1 : last + 1]
            found[row] = _of_states(model, hidden[place : place + len(tokens)], tokens, num_top)
    return found


def _root_places(batch: StepBatch) -> list[int]:
    """Places of the roots in the flattened batch (see InputBatch), on the host."""
    num_known, num_nodes = batch.rows.num_known, batch.num_nodes
    ends = accumulate(known + nodes - 1 for known, nodes in zip(num_known, num_nodes, strict=True))
    return [end - nodes for end, nodes in zip(ends, num_nodes, strict=True)]


def _of_states(model: TargetModel, hidden: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    """Log probabilities of `tokens`, each after the position whose state [n, hidden] is given."""
    size = max(1, SLICE_LOGITS // model.shape.vocab_size)
    entries = []
    for first in range(0, len(tokens), size):
        part = tokens[first : first + size]
        logprobs = model.logits(hidden[first : first + size]).log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(part, device=hidden.device)[:, None])[:, 0].tolist()
        best = logprobs.topk(min(num_top, logprobs.shape[-1]))
        alternatives = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for token, value, (ids, values) in zip(part, own, alternatives, strict=True):
            entries.append(TokenLogprob(token, value, list(zip(ids, values, strict=True))))
    return entries
