"""Functions of torch, computed so that on a CPU a number's bits do not depend on its place in a tensor.

torch's vector instructions round these otherwise than what computes a tensor's last numbers. Of the operations below
that is not so.
"""

import math
from typing import Any

import torch
from torch import Tensor


def sigmoid(input: Tensor) -> Tensor:
    """torch.sigmoid."""
    return _sigmoid(input.float()).to(input.dtype)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """F.silu."""
    wide = input.float()
    result = _sigmoid(wide).mul_(wide).to(input.dtype)
    return input.copy_(result) if inplace else result


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """F.gelu."""
    x = input.float()
    if approximate == "tanh":
        bent = (x * x * x * 0.044715 + x) * math.sqrt(2 / math.pi)
        share = torch.tanh(bent)
    else:
        share = torch.erf(x * math.sqrt(0.5))
    return share.add_(1.0).mul_(x).mul_(0.5).to(input.dtype)


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """F.softplus."""
    x = input.float() * beta
    soft = torch.exp(x.clamp(max=threshold)).log1p_()
    return (torch.where(x > threshold, x, soft) / beta).to(input.dtype)


def polar(abs: Tensor, angle: Tensor) -> Tensor:
    """torch.polar."""
    return torch.complex(abs * angle.cos(), abs * angle.sin())


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """torch.matmul. It is in one order of terms for stacks of matrices with few of them, such as Gemma 3n's tokens."""
    few = 8
    if min(input.dim(), other.dim()) < 3 or other.shape[-2] > few:
        return torch.matmul(input, other)
    left, right = input.float(), other.float()
    result = left[..., :1] * right[..., :1, :]
    for term in range(1, other.shape[-2]):
        result += left[..., term : term + 1] * right[..., term : term + 1, :]
    return result.to(input.dtype)


def product(input: Tensor, other: Any) -> Tensor:
    """torch.mul."""
    if not input.is_complex():
        return torch.mul(input, other)
    if isinstance(other, int | float):
        return torch.view_as_complex(torch.view_as_real(input) * other)
    (a, b), (c, d) = (torch.view_as_real(part).unbind(-1) for part in (input, other))
    return torch.complex(a * c - b * d, a * d + b * c)


def _sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x).add_(1.0).reciprocal_()
