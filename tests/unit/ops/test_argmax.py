"""The two-level argmax equals `torch.argmax`."""

import pytest
import torch

from specray.ops.largest_logits import argmax


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 257, 512, 1000, 1024, 49_152, 151_936])
def test_argmax_equals_torch(vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    assert argmax(logits).tolist() == logits.argmax(-1).tolist()


def test_the_first_of_equal_maxima_is_returned() -> None:
    logits = torch.zeros(3, 2048)
    logits[1, [700, 701, 1500]] = 1.0
    logits[2] = -torch.inf
    assert argmax(logits).tolist() == [0, 700, 0]


def test_the_first_nan_is_returned() -> None:
    logits = torch.zeros(1, 2048)
    logits[0, [900, 1100]] = torch.nan
    logits[0, 3] = torch.inf
    assert argmax(logits).tolist() == [900]


def test_non_contiguous_and_empty_input() -> None:
    logits = torch.randn(4, 2048, generator=torch.Generator().manual_seed(1))[:, :1024]
    assert argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert argmax(logits[:0]).shape == (0,)
