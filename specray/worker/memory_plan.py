"""How a device's memory is divided, before the KV pool is allocated: pure arithmetic.

`mem_fraction_static` is the share of weights and KV, of the target and of its drafter. The rest is for activations,
CUDA graphs, the context of a drafter's own process. If that share is too small for them, the pool gets less. The sizes
of activations and graphs are estimates: they have not been compared with a GPU.
"""

from typing import NamedTuple

_LOGITS_COPIES = 6  # float32 tensors of all logits that sampling needs at once
_GRAPH_BYTES = 16 << 20  # that the driver keeps for a captured forward pass, or for drafting a tree
_CONTEXT_BYTES = 600 << 20  # of CUDA and its libraries, in each process on the device


class Demand(NamedTuple):
    """Bytes on a rank's device beside the target's weights, which are loaded already."""

    token: int  # KV of a token, of target and drafter
    weights: int = 0  # of the drafter
    dynamic: int = 0  # of activations, CUDA graphs and further processes


class StepSize(NamedTuple):
    """Sizes that the activations of a step depend on."""

    num_tokens: int  # of the largest step
    num_sampled: int  # nodes with logits
    width: int  # values of a token that are alive at once, inside a layer
    vocab_size: int
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.width * self.itemsize + self.num_sampled * self.vocab_size * 4 * _LOGITS_COPIES


def pool_bytes(total: int, used: int, fraction: float, demand: Demand) -> int:
    """Bytes for the KV pool of a device of `total` bytes, of which `used` are taken; may be negative."""
    static = int(total * fraction) - used - demand.weights
    return min(static, total - used - demand.weights - demand.dynamic)


def graph_bytes(num_buckets: int, largest: StepSize) -> int:
    """Bytes of CUDA graphs, which share the activations of the largest one."""
    return num_buckets * _GRAPH_BYTES + largest.num_bytes if num_buckets else 0


def process_bytes(num_processes: int) -> int:
    """Bytes of the contexts of further processes on the device."""
    return num_processes * _CONTEXT_BYTES
