"""Attention as custom operators: torch.compile does not look into them.

A compiled graph has fixed shapes and serves every step and every group of layers, so it cannot hold the requests of a
step, the KV pool or a layer number. Its operators read them from `attending`. A graph may have more rows than the step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from specray.ops.attention import Attend, FusedAttend


@dataclass(frozen=True, slots=True, eq=False)
class StepAttention:
    """What the operators read; rows from `num_tokens` on are padding, whose result is zero."""

    attend: Attend | None  # None: everything is padding
    num_tokens: int
    first_layer: int  # number of the running graph's first layer


_step: ContextVar[StepAttention] = ContextVar("step")


@contextmanager
def attending(step: StepAttention) -> Iterator[None]:
    """Within it, the operators belong to `step`."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


class OpaqueAttend:
    """Attend of layer `place` of a compiled graph."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None) -> Tensor:  # noqa: ARG002
        assert kv is not None, "a compiled graph writes its KV"
        result: Tensor = _attend(q, kv, self._place)
        return result


class OpaqueFusedAttend(OpaqueAttend):
    """FusedAttend of layer `place` of a compiled graph, with `num_heads` query heads."""

    def __init__(self, place: int, num_heads: int) -> None:
        super().__init__(place)
        self._num_heads = num_heads

    def rotated(
        self,
        layer: int,  # noqa: ARG002
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Tensor:
        """See FusedAttend."""
        q_norm, k_norm = norms or (None, None)
        result: Tensor = _attend_rotated(qkv, cos, sin, q_norm, k_norm, eps, self._num_heads, self._place)
        return result


@torch.library.custom_op("specray::attend", mutates_args=())
def _attend(q: Tensor, kv: Tensor, place: int) -> Tensor:
    """Write kv [T, 2, kv_heads, dim] to the KV pool and attend with q [T, heads, dim] -> [T, heads * dim]."""
    step = _step.get()
    count = step.num_tokens
    if step.attend is None:
        return q.new_zeros(len(q), q.shape[1] * q.shape[2])
    return _padded(step.attend(step.first_layer + place, q[:count], kv[:count]), len(q))


@_attend.register_fake
def _(q: Tensor, kv: Tensor, place: int) -> Tensor:  # noqa: ARG001
    return q.new_empty(len(q), q.shape[1] * q.shape[2])


@torch.library.custom_op("specray::attend_rotated", mutates_args=("qkv",))
def _attend_rotated(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    place: int,
) -> Tensor:
    """Attention from q, k and v as projected, [T, heads + 2 * kv_heads, dim]; see FusedAttend."""
    step = _step.get()
    count = step.num_tokens
    if step.attend is None:
        return qkv.new_zeros(len(qkv), num_heads * qkv.shape[2])
    assert isinstance(step.attend, FusedAttend), type(step.attend)
    norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
    out = step.attend.rotated(step.first_layer + place, qkv[:count], cos[:count], sin[:count], norms, eps)
    return _padded(out, len(qkv))


@_attend_rotated.register_fake
def _(
    qkv: Tensor,
    cos: Tensor,  # noqa: ARG001
    sin: Tensor,  # noqa: ARG001
    q_norm: Tensor | None,  # noqa: ARG001
    k_norm: Tensor | None,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    num_heads: int,
    place: int,  # noqa: ARG001
) -> Tensor:
    return qkv.new_empty(len(qkv), num_heads * qkv.shape[2])


def _padded(result: Tensor, num_rows: int) -> Tensor:
    """`result` with rows of zeros behind it, contiguous as the compiler expects it."""
    if len(result) == num_rows:
        return result.contiguous()
    padded = result.new_zeros(num_rows, result.shape[1])
    padded[: len(result)] = result
    return padded
