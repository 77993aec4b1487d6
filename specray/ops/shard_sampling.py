"""The choice of a token from some columns of the logits: a tensor-parallel rank's part of the vocabulary.

The rank's best token has a score that is compared with those of the other ranks. Noise belongs to token ids, so the
best of all is the token that `specray.ops.sampling` chooses from all columns. Filters need all columns and are not
supported here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.torch_ops import TorchOps

_NONE = -(2**31)  # the score of no token


class Choices(NamedTuple):
    """Tokens of n rows."""

    tokens: Tensor  # int64
    is_finite: Tensor  # int8: whether the token's logit is finite
    scores: Tensor  # int32, in the order of the tokens' scores; NaN is the largest


def choose_in_shard(
    ops: TorchOps, logits: Tensor, temperature: Tensor | None, keys: Tensor | None, first_id: int
) -> Choices:
    """The best tokens of `logits` float32 [n, columns], whose first column is token `first_id`.

    `temperature` float32 [n] and `keys` [n, 2], the rows' `noise_keys`; None: all rows are greedy. `ops` are those of
    the logits' device.
    """
    scores = logits
    if temperature is not None and keys is not None:
        ids = first_id + torch.arange(logits.shape[1], device=logits.device)
        scores = ops.with_noise(logits[:, None], temperature, keys, ids)[:, 0]
    best = ops.argmax(scores)[:, None]
    is_finite = logits.gather(1, best)[:, 0].isfinite().to(torch.int8)
    return Choices(best[:, 0] + first_id, is_finite, _ordered(scores.gather(1, best)[:, 0]))


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


def _ordered(values: Tensor) -> Tensor:
    """int32 in the order of float32 `values`; NaN is the largest, and both zeros are equal."""
    bits = (values + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.masked_fill(values.isnan(), 0x7FFFFFFF)
