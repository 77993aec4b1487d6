"""Decoder layers compiled by torch.compile, by the number of tokens of a step.

Graphs have fixed shapes: a step is padded to the next larger one. One graph has a few layers, and serves all groups of
layers of the same structure. Attention is opaque to the compiler, see `specray.ops.opaque_attention`.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from specray.ops.attention import Attend, FusedAttend
from specray.ops.opaque_attention import OpaqueAttend, OpaqueFusedAttend, StepAttention, attending

MOST_LAYERS = 8  # of a graph: more take longer to compile, fewer cost more calls in a step
_ANY_NUMBER = 1 << 20  # of graphs; torch gives up after a few by default


class CompiledLayers:
    """Layers of (hidden, cos, sin, attend) -> hidden, for steps of up to `sizes[-1]` tokens."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        num_heads: int,
        sizes: Sequence[int],
        options: dict[str, Any] | None = None,
        backend: Any = "inductor",
    ) -> None:
        """`options` and `backend` are torch.compile's; `num_heads` are query heads of a layer."""
        size = group_size(len(layers))
        self._groups = [tuple(layers[first : first + size]) for first in range(0, len(layers), size)]
        self._attends = tuple(OpaqueAttend(place) for place in range(size))
        self._fused_attends = tuple(OpaqueFusedAttend(place, num_heads) for place in range(size))
        self.sizes = sorted(set(sizes))
        self._run = torch.compile(_run_layers, fullgraph=True, dynamic=False, options=options, backend=backend)

    def takes(self, num_tokens: int) -> bool:
        """Whether there is a graph for so many tokens."""
        return 0 < num_tokens <= self.sizes[-1]

    def compile(self, hidden: Tensor, cos: Tensor, sin: Tensor, is_fused: bool, progress: bool) -> float:
        """Compile all graphs, the largest first, so that no step waits for that; returns the seconds it took.

        hidden [1, hidden], cos and sin [1, 1, dim] are any values. `is_fused`: attention is a FusedAttend. Call it in
        the mode of steps, `torch.inference_mode`: torch compiles others again.
        """
        start = time.perf_counter()
        with torch._dynamo.config.patch(recompile_limit=_ANY_NUMBER, accumulated_recompile_limit=_ANY_NUMBER):
            for size in tqdm(self.sizes[::-1], desc="compiling", unit="size", disable=not progress):
                inputs = [part.repeat_interleave(size, 0) for part in (hidden, cos, sin)]
                with attending(StepAttention(None, size, 0)):
                    for group in self._groups:
                        self._run(group, self._fused_attends if is_fused else self._attends, *inputs)
        return time.perf_counter() - start

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Iterator[Tensor]:
        """The residual stream [T, hidden] that enters each layer, then the one that leaves the last."""
        yield hidden
        count, first_layer = len(hidden), 0
        padding = next(size for size in self.sizes if size >= count) - count
        if padding:
            hidden = F.pad(hidden, (0, 0, 0, padding))
            cos, sin = (F.pad(part, (0, 0, 0, 0, 0, padding)) for part in (cos, sin))
        attends = self._fused_attends if isinstance(attend, FusedAttend) else self._attends
        for group in self._groups:
            # Compiling now would stop all requests for seconds, so a size without a graph runs eagerly.
            with attending(StepAttention(attend, count, first_layer)), torch.compiler.set_stance("eager_on_recompile"):
                streams = self._run(group, attends, hidden, cos, sin)
            hidden = streams[-1]
            first_layer += len(group)
            yield from (stream[:count] for stream in streams) if padding else streams


def group_size(num_layers: int) -> int:
    """Layers of a graph: if possible a divisor of their number, so that one graph serves all groups."""
    return max(
        (size for size in range(MOST_LAYERS // 2, MOST_LAYERS + 1) if num_layers % size == 0), default=MOST_LAYERS
    )


def _run_layers(
    layers: tuple[nn.Module, ...], attends: tuple[OpaqueAttend, ...], hidden: Tensor, cos: Tensor, sin: Tensor
) -> list[Tensor]:
    """The residual streams that leave each of `layers`."""
    streams: list[Tensor] = []
    for layer, attend in zip(layers, attends):  # a last group may have fewer layers than the others  # noqa: B905
        hidden = layer(hidden, cos, sin, attend)
        streams.append(hidden)
    return streams
