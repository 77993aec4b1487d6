"""The choice of a token from some columns of the logits: a tensor-parallel rank's part of the vocabulary.

The rank's best token has a score that is compared with those of the other ranks. Noise belongs to token ids, so the
best of all is the token that `specray.ops.sampling` chooses from all columns. Filters need all columns and are not
supported here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.step_tensors import Choices
from specray.ops.torch_ops import TorchOps, ordered

_NONE = -(2**31)  # the score of no token


def choose_in_shard(
    ops: TorchOps, logits: Tensor, temperature: Tensor | None, keys: Tensor | None, first_id: int
) -> Choices:
    """The best tokens of `logits` [n, columns], whose first column is token `first_id`.

    `temperature` float32 [n] and `keys` [n, 2], the rows' `noise_keys`; None: all rows are greedy. `ops` are those of
    the logits' device.
    """
    scores = logits
    if temperature is not None and keys is not None:
        ids = first_id + torch.arange(logits.shape[1], device=logits.device)
        scores = ops.with_noise(logits[:, None], temperature, keys, ids)[:, 0]
    best = ops.argmax(scores)[:, None]
    is_finite = logits.gather(1, best)[:, 0].isfinite().to(torch.int8)
    return Choices(best[:, 0] + first_id, is_finite, ordered(scores.gather(1, best)[:, 0].float()))


def none_of(count: int, device: torch.device) -> Choices:
    """The choices of a rank without columns."""
    none = torch.zeros(count, dtype=torch.int64, device=device)
    return Choices(none, none.to(torch.int8), torch.full_like(none, _NONE, dtype=torch.int32))


def best_of(choices: Tensor) -> Choices:
    """The best of several ranks' `packed` choices, int64 [n, ranks, 3]. Of equal scores, the first rank's wins."""
    best = choices[:, :, 0].argmax(1)
    scores, tokens, is_finite = choices[torch.arange(len(choices), device=choices.device), best].unbind(1)
    return Choices(tokens, is_finite.to(torch.int8), scores.to(torch.int32))


def packed(choices: Choices) -> Tensor:
    """int64 [n, 3]: score, token and whether it is finite."""
    return torch.stack((choices.scores.long(), choices.tokens, choices.is_finite.long()), 1)


def top_in_shard(logits: Tensor, count: int, first_column: int) -> Tensor:
    """What other ranks must know of logits [..., columns], whose first column is `first_column` of all.

    float32 [..., 2 * count + 1]: the `count` highest, best first, their columns, and the logarithm of the sum of all
    exponentials. Columns are below 2 ** 24, so that float32 has them.
    """
    best = logits.topk(min(count, logits.shape[-1]))
    missing = (0, count - best.values.shape[-1])
    values, columns = F.pad(best.values, missing, value=-torch.inf), F.pad(best.indices + first_column, missing)
    return torch.cat((values, columns.to(values.dtype), logits.logsumexp(-1, keepdim=True)), -1)


def top_of_shards(tops: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(probabilities, columns int64) [..., count], best first, of several ranks' `top_in_shard` [..., ranks, m]."""
    values, columns, total = tops.split_with_sizes((count, count, 1), -1)
    best = values.flatten(-2).sort(dim=-1, descending=True, stable=True)
    places = best.indices[..., :count]
    probs = (best.values[..., :count] - total.flatten(-2).logsumexp(-1, keepdim=True)).exp()
    return probs, columns.flatten(-2).gather(-1, places).to(torch.int64)
