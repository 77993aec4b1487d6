"""The choice of a token from some columns of the logits: a tensor-parallel rank's part of the vocabulary.

The rank's best token has a score that is compared with those of the other ranks. Noise belongs to token ids, so the
best of all is the token that `specray.ops.sampling` chooses from all columns. Filters need all columns and are not
supported here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.cpu.library import kernels_on
from specray.ops.cpu.pointer import pointer
from specray.ops.largest_logits import argmax
from specray.ops.noise import gumbel
from specray.ops.sampling_state import GREEDY_BELOW

_NONE = -(2**31)  # the score of no token


class Choices(NamedTuple):
    """Tokens of n rows."""

    tokens: Tensor  # int64
    is_finite: Tensor  # int8: whether the token's logit is finite
    scores: Tensor  # int32, in the order of the tokens' scores; NaN is the largest


def choose_in_shard(logits: Tensor, temperature: Tensor | None, keys: Tensor, first_id: int) -> Choices:
    """The best tokens of `logits` float32 [n, columns], whose first column is token `first_id`.

    `temperature` is float32 [n]; None: all rows are greedy. `keys` [n, 2] are the rows' `noise_keys`.
    """
    scores = logits if temperature is None else _with_noise(logits, temperature, keys, first_id)
    return _best(scores, logits, first_id)


def choose_greedily(logits: Tensor, first_id: int) -> Choices:
    """The tokens of the largest logits."""
    return _best(logits, logits, first_id)


def _best(scores: Tensor, logits: Tensor, first_id: int) -> Choices:
    best = argmax(scores)[:, None]
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


def _with_noise(logits: Tensor, temperature: Tensor, keys: Tensor, first_id: int) -> Tensor:
    """Logits; where sampled, over temperature and with noise."""
    ids, is_sampled = first_id + torch.arange(logits.shape[1], device=logits.device), temperature >= GREEDY_BELOW
    own = kernels_on(logits.device)
    if own is not None:
        noisy, keys = logits.clone(), keys.contiguous()
        for row in is_sampled.nonzero().flatten().tolist():
            own.add_noise(pointer(noisy[row]), len(ids), pointer(ids), float(temperature[row]), pointer(keys[row]))
        return noisy
    scaled = logits / temperature.where(is_sampled, 1.0)[:, None]
    return torch.where(is_sampled[:, None], scaled + gumbel(keys, len(ids), ids), logits)


def _ordered(values: Tensor) -> Tensor:
    """int32 in the order of float32 `values`; NaN is the largest, and both zeros are equal."""
    bits = (values + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.masked_fill(values.isnan(), 0x7FFFFFFF)
