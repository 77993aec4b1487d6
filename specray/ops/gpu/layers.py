"""Element-wise operations of decoder layers on a GPU, each in one launch. `TorchOps` says what they do."""

import torch
import triton
from torch import Tensor

from specray.ops.attention import as_bytes
from specray.ops.gpu.launches import of_float8, starts_early
from specray.ops.gpu.layer_kernels import (
    gather_angles,
    join_rows,
    norm_rows,
    quantise_row,
    rotate_head,
    silu_block,
)

_SILU_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, size] * weight / sqrt(mean(x^2) + eps)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _norm(x, x, out, weight, eps, adds=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm of x + residual, both [T, size] and contiguous; x becomes the sum."""
    out = torch.empty_like(x)
    _norm(x, residual, out, weight, eps, adds=True)
    return out


def join_normed(
    token_ids: Tensor, embedding: Tensor, states: Tensor, norms: tuple[Tensor, Tensor], eps: float, keeps: bool
) -> tuple[Tensor, Tensor | None]:
    """([norms[0] of the tokens' embeddings, norms[1] of states] [T, 2 * size], its second half again if `keeps`).

    token_ids are int64 [T], states [T, size], of the embedding's type.
    """
    states, size = states.contiguous(), states.shape[-1]
    joined = torch.empty(len(states), 2 * size, dtype=states.dtype, device=states.device)
    normed = torch.empty_like(states) if keeps else None
    padded = triton.next_power_of_2(size)
    if states.numel():
        join_rows[(len(states),)](
            joined,
            joined if normed is None else normed,
            token_ids.contiguous(),
            embedding,
            states,
            *norms,
            eps,
            SIZE=size,
            PADDED=padded,
            KEEPS=keeps,
            num_warps=min(16, max(1, padded // 256)),
            **starts_early(states.device),
        )
    return joined, normed


def angles_at(tables: tuple[Tensor, Tensor], positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, signed sin), each [T, 1, dim] of `dtype`, from float32 tables [any, dim] at positions int64 [T]."""
    count, dim = len(positions), tables[0].shape[1]
    cos, sin = torch.empty(2, count, 1, dim, dtype=dtype, device=positions.device)
    if count:
        padded = triton.next_power_of_2(dim)
        gather_angles[(count,)](cos, sin, *tables, positions.contiguous(), DIM=dim, PADDED=padded, num_warps=1)
    return cos, sin


def _norm(x: Tensor, residual: Tensor, out: Tensor, weight: Tensor, eps: float, adds: bool) -> None:
    size = x.shape[-1]
    padded = triton.next_power_of_2(size)
    if x.numel():
        norm_rows[(x.numel() // size,)](
            x,
            residual,
            out,
            weight,
            eps,
            SIZE=size,
            PADDED=padded,
            ADDS=adds,
            num_warps=min(16, max(1, padded // 256)),
            **starts_early(x.device),
        )


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    pool: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Norm and rotate q (in place) and k, and write k and v to their KV slots.

    qkv [T, heads + 2 * kv_heads, dim] is contiguous; cos and signed sin [T, 1, dim] are float32 (see RotaryEmbedding);
    `norms` are the weights [dim] of q and k; pool is one layer [slots, 2, kv_heads, dim]; slot_mapping int64 [T].
    """
    num_tokens, num_heads, dim = qkv.shape
    kv_heads = pool.shape[2]
    q_norm, k_norm = norms or (qkv, qkv)
    if num_tokens:
        rotate_head[(num_tokens, num_heads)](
            qkv,
            cos,
            sin,
            q_norm,
            k_norm,
            eps,
            as_bytes(pool),
            slot_mapping,
            pool.stride(0),
            Q_HEADS=num_heads - 2 * kv_heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            HALF_PADDED=triton.next_power_of_2(dim // 2),
            HAS_NORM=norms is not None,
            MANTISSA=of_float8(pool)["MANTISSA"],
            num_warps=1,
            **starts_early(qkv.device),
        )


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up from [T, 2 * size], gate first -> [T, size]."""
    num_tokens, size = len(gate_up), gate_up.shape[-1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        silu_block[(num_tokens, triton.cdiv(size, _SILU_BLOCK))](gate_up, out, size, BLOCK=_SILU_BLOCK)
    return out


def quantise_rows(x: Tensor, width: int, smallest: float) -> tuple[Tensor, Tensor]:
    """(x [T, size] / scale as float8_e4m3fn [T, width], with zeros behind it, the scales float32 [T, 1])."""
    x, dtype = x.contiguous(), torch.float8_e4m3fn
    quantised = torch.empty(len(x), width, dtype=dtype, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    if len(x):
        padded = triton.next_power_of_2(width)
        quantise_row[(len(x),)](
            x,
            quantised,
            scales,
            smallest,
            torch.finfo(dtype).max,
            SIZE=x.shape[1],
            WIDTH=width,
            PADDED=padded,
            num_warps=min(16, max(1, padded // 256)),
        )
    return quantised, scales
