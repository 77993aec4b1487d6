"""The operations with states by the CPU kernels."""

import ctypes

import torch
from torch import Tensor

from specray.ops.cpu.library import Kernels
from specray.ops.cpu.processor import num_threads
from specray.ops.cpu.structs import FLOAT_TYPES, ConvolutionStruct, DeltaNetStruct, StateRowsStruct, pointer
from specray.ops.states import StateRows
from specray.ops.states_torch import Convolution, DeltaNet


def convolve(kernels: Kernels, conv: Convolution, x: Tensor, pool: Tensor, rows: StateRows) -> Tensor:
    """See TorchOps.convolve."""
    x = x.contiguous()
    result, (width, size) = torch.empty_like(x), conv.weights.shape
    struct = ConvolutionStruct(
        size,
        width,
        conv.has_silu,
        FLOAT_TYPES[x.dtype],
        pointer(conv.weights),
        pointer(conv.bias),
        pointer(pool),
    )
    struct_of_rows = _rows(rows)
    threads = num_threads(width * x.numel() * x.itemsize)
    kernels.convolve(ctypes.byref(struct), ctypes.byref(struct_of_rows), pointer(x), pointer(result), threads)
    return result


def gated_delta(
    kernels: Kernels, net: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, pool: Tensor, rows: StateRows
) -> Tensor:
    """See TorchOps.gated_delta."""
    qkv, a, b, z = (part.contiguous() for part in (qkv, a, b, z))
    result = torch.empty_like(z)
    struct = DeltaNetStruct(
        net.num_k_heads,
        net.num_v_heads,
        net.k_dim,
        net.v_dim,
        FLOAT_TYPES[z.dtype],
        net.beta_scale,
        net.eps,
        pointer(net.rates),
        pointer(net.dt_bias),
        pointer(net.norm),
        pointer(pool),
    )
    struct_of_rows = _rows(rows)
    threads = num_threads(rows.total * net.num_v_heads * net.k_dim * net.v_dim * pool.itemsize)
    inputs = (pointer(part) for part in (qkv, a, b, z, result))
    kernels.gated_delta(ctypes.byref(struct), ctypes.byref(struct_of_rows), *inputs, threads)
    return result


def _rows(rows: StateRows) -> StateRowsStruct:
    tensors = (rows.slots, rows.lens, rows.num_known, rows.is_fresh, rows.parents, rows.copies)
    return StateRowsStruct(rows.lens.shape[0], rows.total, *map(pointer, tensors))
