"""Muon in float32 makes torch's steps, and continues from its state."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from specray.train.optimizer import Optimizer

RATE, CLIP = 0.02, 1.0


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 32), nn.Linear(32, 64))


def train(model: nn.Module, optimizer: Optimizer, num_steps: int) -> None:
    random = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        model(torch.randn(16, 96, generator=random)).square().sum().backward()
        optimizer.step(RATE, CLIP)


def distance(one: nn.Module, other: nn.Module) -> float:
    """Mean difference of the weights."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().mean()) for a, b in pairs)


def test_both_types_make_the_same_steps() -> None:
    start = module()
    ends = []
    for dtype in (torch.bfloat16, torch.float32):
        model = deepcopy(start)
        train(model, Optimizer(model, "muon", 0.1, dtype), 8)
        ends.append(model)
    assert distance(*ends) < 0.02 * distance(start, ends[0])


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_run_continues_in_the_other_type(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    model, other = module(), module()
    first = Optimizer(model, "muon", 0.1, dtypes[0])
    train(model, first, 4)
    other.load_state_dict(model.state_dict())
    second = Optimizer(other, "muon", 0.1, dtypes[1])
    second.load_state_dict(deepcopy(first.state_dict()))
    start = deepcopy(model)
    train(model, first, 4)
    train(other, second, 4)
    assert distance(model, other) < 0.02 * distance(start, model)


def test_the_state_of_a_mask_moves_by_its_gradient() -> None:
    """Muon would move every element of a matrix of one row equally far, and a mask hardly at all."""
    head = nn.Module()
    head.mask_hidden = nn.Parameter(torch.zeros(1, 64))
    optimizer = Optimizer(head, "muon", 0.1, torch.float32)
    for _ in range(5):
        (head.mask_hidden - 1).square().sum().backward()
        optimizer.step(RATE, CLIP)
    torch.testing.assert_close(head.mask_hidden.detach(), torch.full((1, 64), 5 * RATE), atol=1e-3, rtol=0.05)
