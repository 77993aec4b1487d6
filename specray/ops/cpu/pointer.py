"""Addresses of tensors, as the CPU kernels take them."""

from torch import Tensor


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a contiguous CPU tensor's data."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()
