"""Selection of the attention kernels."""

from torch import Tensor

from specray.ops.attention import AttentionBackend
from specray.ops.attention_torch import TorchAttention


def make_backend(name: str, pool: Tensor, num_heads: int) -> AttentionBackend:
    """Kernels for `num_heads` query heads over `pool`; `name` is EngineConfig.attention_backend."""
    assert name in ("auto", "torch"), name
    return TorchAttention(pool, num_heads)
