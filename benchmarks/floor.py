"""A lower bound for plain decoding: the time of one token's weight matmuls alone.

The matrices have the target's shapes and type, and the activations are one random row. Timed with torch's `F.linear`
and with the engine's kernel; the bound is the faster of the two.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.models.causal_lm import TargetModel
from specray.models.llama_shape import LlamaShape
from specray.ops.cpu.threads import torch_threads
from specray.ops.linear import make_linear

Pass = list[Callable[[], Tensor]]


class Floor:
    """Times the matmuls, a few passes at a time, between the variants' runs."""

    def __init__(self, model: TargetModel) -> None:
        assert isinstance(model.shape, LlamaShape)
        like = model.embedding.weight
        weights = [torch.randn(size).to(like) * 0.02 for size in _sizes(model.shape)]
        rows = [torch.randn(1, weight.shape[1]).to(like) for weight in weights]
        self._passes: list[Pass] = [
            [partial(F.linear, x, weight) for x, weight in zip(rows, weights, strict=True)],
            [partial(make_linear(weight), x) for x, weight in zip(rows, weights, strict=True)],
        ]
        self._seconds: list[list[float]] = [[] for _ in self._passes]
        self._on_gpu = like.is_cuda

    @torch.inference_mode()
    def sample(self, num_passes: int = 4) -> None:
        for _ in range(num_passes):
            for matmuls, seconds in zip(self._passes, self._seconds, strict=True):
                with torch_threads():
                    start = time.perf_counter()
                    for matmul in matmuls:
                        matmul()
                    if self._on_gpu:
                        torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - start)

    @property
    def milliseconds(self) -> float:
        return 1000 * min(median(seconds) for seconds in self._seconds)

    @property
    def linear_milliseconds(self) -> float:
        """The time with `F.linear`, for comparison with engines that call it."""
        return 1000 * median(self._seconds[0])


def _sizes(shape: LlamaShape) -> Iterator[tuple[int, int]]:
    """[out, in] of every weight matrix a token passes."""
    heads = shape.num_heads * shape.head_dim
    for _ in range(shape.num_layers):
        yield heads + 2 * shape.num_kv_heads * shape.head_dim, shape.hidden_size
        yield shape.hidden_size, heads
        yield 2 * shape.ffn_size, shape.hidden_size
        yield shape.hidden_size, shape.ffn_size
    yield shape.vocab_size, shape.hidden_size
