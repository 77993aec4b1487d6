"""Masks of a grammar on logits: the kernel and torch set the same logits to minus infinity."""

import pytest
import torch

from specray.ops.device_ops import ops_on
from specray.ops.sampling_state import num_mask_words
from tests.support.sampling import mask_of


@pytest.mark.parametrize("uses_kernels", [True, False])
@pytest.mark.parametrize("vocab_size", [1, 8, 31, 32, 64, 1000])
def test_forbidden_tokens_are_minus_infinity(
    vocab_size: int, uses_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not uses_kernels:
        monkeypatch.setenv("SPECRAY_KERNELS", "torch")
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(7, vocab_size, generator=generator)
    allowed = torch.rand(5, vocab_size, generator=generator) < 0.5
    allowed[1], allowed[2] = True, False
    rows, expected = [6, 0, 2, 3, 5], logits.clone()
    expected[rows] = expected[rows].masked_fill(~allowed, -torch.inf)
    mask = mask_of(allowed, rows)
    assert mask.bits.shape == (5, num_mask_words(vocab_size))
    ops_on(logits.device).forbid(logits, *mask)
    assert torch.equal(logits, expected)
