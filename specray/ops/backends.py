"""Selection of the attention kernels."""

from torch import Tensor

from specray.ops.attention import AttentionBackend
from specray.ops.attention_torch import TorchAttention
from specray.ops.cpu.attention import PagedAttention
from specray.ops.cpu.library import kernels
from specray.ops.gpu import check_triton, uses_triton


def make_backend(name: str, pool: Tensor, num_heads: int) -> AttentionBackend:
    """Kernels for `num_heads` query heads over `pool`; `name` is EngineConfig.attention_backend."""
    if name == "triton":
        check_triton(pool.device)
    if name == "triton" or (name == "auto" and uses_triton(pool.device)):
        from specray.ops.gpu.attention import TritonAttention  # triton is there on machines with GPUs only

        return TritonAttention(pool, num_heads)
    own = kernels() if name == "auto" and pool.device.type == "cpu" else None
    return TorchAttention(pool, num_heads) if own is None else PagedAttention(own, pool, num_heads)
